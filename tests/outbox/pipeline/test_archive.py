"""The archiving job as a process. It does not get as far as Spark here."""

import os
import subprocess
import sys

import pytest
from django.db import connection

from outbox import database
from tests.database_url import url_of
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
        told = {"DATABASE_URL": url_of(connection.settings_dict), "DJANGO_SETTINGS_MODULE": "tests.settings"}
        with database.connect("default") as holder, database.connect("default") as watcher, holder.transaction():
            holder.execute("LOCK TABLE outbox_archived_day")  # where the job looks for days: it can go no further
            command = [sys.executable, "-c", ARCHIVE, str(tmp_path)]
            with subprocess.Popen(command, env={**os.environ, **told}, stdin=subprocess.PIPE) as process:
                wait_until(lambda: at_work(watcher) == [True], seconds=30)

                process.kill()

                wait_until(lambda: at_work(watcher) == [], seconds=30)
