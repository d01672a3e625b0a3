import re

import pytest
from django.core.checks import Error

from outbox.pipeline.checks import pipeline_settings
from outbox.pipeline.conf import PipelineSettings


class TestE001:
    @pytest.mark.parametrize(
        ("pipeline", "text"),
        [
            ({"AUDITS": {}}, r"OUTBOX\[\"PIPELINE\"\] has an unknown setting 'AUDITS'.*Did you mean AUDIT\?"),
            (
                {"AUDIT": {"orders": {"MODEL": "shop.Order"}}},
                r'^OUTBOX\["PIPELINE"\]\["AUDIT"\]\["orders"\] has no EXPECTS, which is required\. ',
            ),
            ({"AUDIT_RETENTION": "soon"}, r"has a wrong value: Invalid ISO8601 duration.*Write timedelta"),
            ({"AUDIT_RETENTION": "PT0S"}, r'\["PIPELINE"\]\["AUDIT_RETENTION"\] is 0:00:00; it must be greater than zero'),
        ],
        ids=["an unknown name", "a name left out", "no duration", "a duration of zero"],
    )
    def test_says_what_is_wrong_with_the_settings(self, settings, found, pipeline, text):
        settings.OUTBOX = {"PIPELINE": pipeline}

        (problem,) = found()

        assert (problem.id, type(problem)) == ("outbox.E001", Error)
        assert re.search(text, f"{problem.msg} {problem.hint}")
        assert "outbox/pipeline/conf.py" in problem.hint

    def test_leaves_what_is_no_dict_to_the_outbox(self, settings, found):
        settings.OUTBOX = {"PIPELINE": ["audit"]}

        assert [problem.id for problem in found()] == ["outbox.E001"]

    def test_is_quiet_otherwise(self, settings, found):
        settings.OUTBOX = {"PIPELINE": {"AUDIT_RETENTION": "P30D", "ARCHIVE": {"PATH": "/srv/lake"}}}

        assert found() == []


class TestPipelineSettings:
    def test_are_the_default_ones_where_the_check_has_reported_wrong_ones(self, settings):
        settings.OUTBOX = {"PIPELINE": {"AUDITS": {}}}

        assert pipeline_settings() == PipelineSettings()
