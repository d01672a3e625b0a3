"""The archiving job as a process, which does not get as far as Spark here; and what the archive holds back from the prune."""

import subprocess
import sys
from datetime import UTC, date, datetime, timedelta

import pytest

from outbox import database
from outbox.database import partitions
from outbox.models import Duplicate, Gap
from outbox.pipeline.archive import HOLD
from outbox.pipeline.models import ArchivedDay, RecordedMessage
from outbox.relay.maintenance import prune
from tests.database_url import environment_of
from tests.factories import message_id
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

ARCHIVE = """
import signal
import sys
import django
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for what it starts in the background
django.setup()
from django.conf import settings
from django.core.management import call_command
from django.test import override_settings
with override_settings(OUTBOX={**settings.OUTBOX, "PIPELINE": {"ARCHIVE": {"PATH": sys.argv[1]}}}):
    call_command("outbox_archive", "--database", "default")
"""

# Whether the job waits for a lock, of each of its connections.
AT_WORK = """
SELECT wait_event_type IS NOT DISTINCT FROM 'Lock' FROM pg_stat_activity
WHERE application_name = 'outbox archive' AND datname = current_database()
"""


def at_work(watcher):
    return [is_waiting for (is_waiting,) in watcher.execute(AT_WORK)]


class TestAKilledProcess:
    def test_takes_its_job_along(self, tmp_path):
        with database.connect("default") as holder, database.connect("default") as watcher, holder.transaction():
            holder.execute("LOCK TABLE outbox_archived_day")  # where the job looks for days: it can go no further
            command = [sys.executable, "-c", ARCHIVE, str(tmp_path)]
            with subprocess.Popen(command, env=environment_of("tests.process_settings"), stdin=subprocess.PIPE) as process:
                wait_until(lambda: at_work(watcher) == [True], seconds=30)

                process.kill()

                wait_until(lambda: at_work(watcher) == [], seconds=30)


class TestTheHold:
    OLD, YOUNGER = date(2001, 2, 3), date(2001, 2, 12)
    NOW = datetime(2001, 2, 20, 12, tzinfo=UTC)

    @pytest.fixture(autouse=True)
    def _old_days(self, with_archive):
        with database.connect("default") as own:
            for day in (self.OLD, self.YOUNGER):
                partitions.create_partition(own, day)
        yield
        with database.connect("default") as own:
            for day in (self.OLD, self.YOUNGER):
                own.execute(f"DROP TABLE IF EXISTS {partitions.table_of(day)}")

    def test_leaves_days_to_the_archiver_even_when_the_lake_is_said_to_have_them(self):
        ArchivedDay.objects.create(day=self.OLD, state="committed", attempt=1, rows=0, digest="0")

        pruned = prune("default", now=self.NOW)

        assert (pruned.days, pruned.kept) == ([], dict.fromkeys((self.OLD, self.YOUNGER), "not archived yet"))

    def test_leaves_it_the_rows_that_it_takes_along(self):
        long_ago = datetime(2001, 2, 3, 12, tzinfo=UTC)
        lost = {"source": "s", "topic": "t", "lane": 1, "first_number": 1, "last_number": 2}
        RecordedMessage.objects.create(topic="t", message_id=message_id(), recorded_at=long_ago)
        Duplicate.objects.create(consumer_group="g", message_id=message_id(), topic="t", delivery_count=2, dropped_at=long_ago)
        Gap.objects.create(consumer_group="g", **lost, closed_at=long_ago)

        pruned = prune("default", now=self.NOW)

        assert (RecordedMessage.objects.count(), Duplicate.objects.count(), pruned.rows["outbox_gap"]) == (1, 1, 1)
        assert not HOLD.tables & pruned.rows.keys()

    def test_lasts_as_long_as_the_archive_says(self, settings):
        settings.OUTBOX = {**settings.OUTBOX, "PIPELINE": {"ARCHIVE": {"PATH": "/srv/lake", "AFTER": timedelta(days=400)}}}

        assert prune("default", now=self.NOW).kept == {}

    def test_is_none_without_an_archive(self, settings):
        settings.OUTBOX = {**settings.OUTBOX, "PIPELINE": {}}

        assert [day.day for day in prune("default", now=self.NOW).days] == [3, 12]

    def test_sends_an_alert_when_nobody_archives_for_days(self, alerts):
        prune("default", now=self.NOW)

        assert len(alerts) == 1
        assert "2001-02-03 (not archived yet)" in alerts[0]["reason"]
        assert "2001-02-12" not in alerts[0]["reason"]
