"""Histories that were broken, audited by Spark: each time a finding that names the thing, or an error that says what to do."""

import re
from datetime import timedelta

import pytest

from outbox.pipeline.job_config import pipeline_config
from outbox.pipeline.spark.audit.run import audit
from outbox.pipeline.spark.errors import HistoryError
from outbox.pipeline.spark.history import open_history
from outbox.pipeline.spark.jobs.report import backlog_report, latency_report
from outbox.pipeline.spark.sources.postgres import copy_history
from tests.outbox.pipeline.quick_check.broken import BROKEN, installed_long_ago, play, run

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _no_business_rows(settings):
    settings.OUTBOX = {**settings.OUTBOX, "PIPELINE": {"AUDIT": {}}}


@pytest.fixture
def audited(spark, tmp_path):
    """Audit the database as the job does; give what the findings say."""

    def audited(**options):
        config = pipeline_config(settle=timedelta(0), reader="python", shuffle_partitions=2, **options)
        copy_history(spark, config, str(tmp_path))
        history = open_history(spark, str(tmp_path))
        report = audit(spark, config, history)
        backlog_report(spark, config, history)
        found = [one["text"] for one in latency_report(spark, config, history)["findings"]]
        return [*(str(one) for one in report.findings), *found]

    return audited


# One of each way in which reading can stumble; the quick check takes them all.
IN_SPARK = (
    "a topic row that is gone",
    "a batch without a lane",
    "headers that are not JSON",
    "a number that is a text",
    "the highest number there is",
    "times that never end",
    "times far ahead",
    "everything gone but the lanes",
)


class TestAnAuditOfABrokenHistory:
    @pytest.mark.parametrize("what", IN_SPARK)
    def test_names_what_is_broken(self, audited, what):
        play()
        statements, finding = BROKEN[what]

        for statement in statements:
            run(statement)
        said = audited()

        assert [one for one in said if re.match(finding, one)], said

    def test_proves_nothing_where_nothing_is_left(self, audited):
        play()
        for statement in BROKEN["everything gone but the lanes"][0]:
            run(statement)

        with installed_long_ago(), pytest.raises(HistoryError, match=r"no message, batch or inbox row.* Nothing was proved"):
            audited()
