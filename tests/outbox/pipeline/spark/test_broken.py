"""Histories that were broken, audited by Spark: each time a finding that names the thing, or an error that says what to do."""

import re
from datetime import timedelta

import pytest

from outbox.pipeline.job_config import pipeline_config
from outbox.pipeline.spark import HistoryError
from outbox.pipeline.spark.audit import audit
from outbox.pipeline.spark.history import open_history
from outbox.pipeline.spark.latency import backlog_report, count_times, latency_report
from outbox.pipeline.spark.postgres import copy_history
from tests.outbox.pipeline.spark.broken import BROKEN, installed_long_ago, play, run

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
        times = count_times(spark, config, history)
        backlog_report(config, history, times)
        found = [one["text"] for one in latency_report(config, times)["findings"]]
        return [*(str(one) for one in report.findings), *found]

    return audited


# Of different rows or columns, so that one audit, which takes seconds, names them all.
TOGETHER = {
    "values": (
        "headers that JSON allows and PostgreSQL does not",
        "headers at the broker that are cut",
        "a number that no integer holds",
        "a negative number",
        "a batch whose arrays have different lengths",
        "a batch that lost a position it never had",
        "times beyond the calendar",
        "times before the calendar",
    ),
    "batches": (
        "a batch without a lane",
        "a batch without numbers",
        "headers that are not JSON",
        "a number that is a text",
        "the highest number there is",
        "a lane that has given out all numbers",
        "a state that there is not",
        "times that never end",
        "times far ahead",
    ),
    "a topic": ("a topic row that is gone",),
    "everything": ("everything gone but the lanes",),
}
assert sorted(what for broken in TOGETHER.values() for what in broken) == sorted(BROKEN)


class TestAnAuditOfABrokenHistory:
    @pytest.mark.parametrize("broken", TOGETHER.values(), ids=TOGETHER)
    def test_names_what_is_broken(self, audited, broken):
        play(batches=4 if len(broken) > 1 else 1)

        for what in broken:
            for statement in BROKEN[what][0]:
                run(statement)
        said = audited()

        assert [what for what in broken if not any(re.match(BROKEN[what][1], one) for one in said)] == [], said

    @pytest.mark.usefixtures("backslashes_escape")
    def test_names_it_in_a_database_that_reads_backslashes_as_escapes(self, audited):
        what = "headers that are not JSON"
        play()
        run(BROKEN[what][0][0])

        assert [one for one in audited() if re.match(BROKEN[what][1], one)]

    def test_proves_nothing_where_nothing_is_left(self, audited):
        play()
        for statement in BROKEN["everything gone but the lanes"][0]:
            run(statement)

        with installed_long_ago(), pytest.raises(HistoryError, match=r"no message, batch or inbox row.* Nothing was proved"):
            audited()
