"""Processes that stand still (SIGSTOP) where they hold a lock that others wait for."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import date, timedelta

import psycopg
import pytest
from django.db import connection as django_connection

from outbox import atomic, database, publish_raw
from outbox.database import partitions
from outbox.database.locks import Lock
from outbox.pipeline.job_config import pipeline_config
from outbox.pipeline.models import AuditRun
from outbox.pipeline.runs import run_and_store
from outbox.pipeline.spark.statements import keep_alive
from tests.database_url import url_of
from tests.outbox.pipeline.spark.archive.conftest import SECOND
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

IN_DELETE = """
SELECT pid FROM pg_stat_activity WHERE application_name = 'outbox archive' AND state = 'idle in transaction'
AND datname = current_database() AND query LIKE '%outbox_archived_day%'
"""
HOLDS_LOCK = """
SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted AND classid = %s
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
ENDED_WITHIN = 5.0  # seconds; a transaction that others wait for


def archiver(failpoint, lake):
    command = [sys.executable, "-m", "tests.outbox.pipeline.spark.archive.archiver"]
    return subprocess.Popen(
        [*command, url_of(django_connection.settings_dict), str(lake), str(SECOND)],
        env={**os.environ, "OUTBOX_FAILPOINTS": f"archive.{failpoint}=hang"},
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def stopped(process):
    """Stop a process for the length of the block; then kill it."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def holds(watcher, lock):
    return watcher.execute(HOLDS_LOCK, [lock]).fetchone() != (0,)


@pytest.fixture
def watcher():
    with database.connect("default") as watcher:
        yield watcher


@pytest.mark.spark
class TestAnArchiveThatStandsStill:
    def test_while_it_drops_a_day_keeps_publishers_waiting_for_seconds_only(self, ids, tmp_path, watcher):
        process = archiver("in_delete", tmp_path)
        wait_until(lambda: watcher.execute(IN_DELETE).fetchone(), seconds=60)
        with stopped(process):
            began = time.monotonic()

            with atomic():
                publish_raw("orders", {})

            assert time.monotonic() - began < ENDED_WITHIN + 3
        with database.connect("default") as own:
            assert partitions.table_of(date(2001, 2, 3)) in map(partitions.table_of, partitions.days(own))

    def test_keeps_no_audit_from_running(self, ids, tmp_path, watcher, job_that):
        job_that("is clean")
        process = archiver("after_plan", tmp_path)
        wait_until(lambda: holds(watcher, Lock.ARCHIVE), seconds=60)
        with stopped(process):
            config = pipeline_config(settle=timedelta(minutes=5))

            run, _ = run_and_store("default", config, asked_by="command", log=lambda line: None)

            assert run.state == AuditRun.RunState.DONE
            assert holds(watcher, Lock.ARCHIVE)


class TestADayThatIsDropped:
    def test_by_a_process_that_stands_still_is_kept(self, watcher):
        day = date(2001, 5, 6)
        partitions.create_partition(watcher, day)

        with pytest.raises(psycopg.OperationalError):
            partitions.drop_partition(watcher, day, unless=lambda: not wait_until(lambda: is_ended(watcher)))
        with database.connect("default") as other:
            assert day in partitions.days(other)
            assert partitions.drop_partition(other, day, unless=lambda: False)


def is_ended(connection):
    """Return whether the server has ended a connection, without a word to the server."""
    connection.pgconn.consume_input()
    return connection.pgconn.status == psycopg.pq.ConnStatus.BAD


class TestASessionThatLasts:
    END = "SET idle_session_timeout = '300ms'"

    def test_is_ended_when_it_says_nothing(self, watcher):
        with database.connect("default") as silent:
            silent.execute(self.END)
            silent.execute(f"SELECT pg_advisory_lock({Lock.AUDIT}, 0)")

            wait_until(lambda: not holds(watcher, Lock.AUDIT), seconds=10)

    def test_is_kept_while_its_process_lives(self, watcher):
        with database.connect("default") as lasting, database.connect("default") as silent:
            for one in lasting, silent:
                one.execute(self.END)
            lasting.execute(f"SELECT pg_advisory_lock({Lock.AUDIT}, 0)")
            silent.execute(f"SELECT pg_advisory_lock({Lock.ARCHIVE}, 0)")

            with keep_alive(lasting, every=0.05):
                wait_until(lambda: not holds(watcher, Lock.ARCHIVE), seconds=10)

                assert holds(watcher, Lock.AUDIT)
