"""
Store runs of the audit, and detect runs whose process has died.

A running audit holds an advisory lock on a separate connection. So there is one audit at a time, and a run in state RUNNING
without that lock has died.
"""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

from django.db import DEFAULT_DB_ALIAS
from django.utils import timezone

from outbox import database
from outbox.database import guarded
from outbox.database.locks import END_IDLE_SESSION, Lock
from outbox.logs import cut, get_logger
from outbox.pipeline.audit_runs import verdict
from outbox.pipeline.conf import settings
from outbox.pipeline.errors import AuditFailed, AuditRunning
from outbox.pipeline.models import AuditBacklog, AuditFinding, AuditLatency, AuditRun
from outbox.pipeline.spark.sources.snapshot import keep_alive

logger = get_logger(__name__)

TRY_LOCK = f"SELECT pg_try_advisory_lock({Lock.AUDIT}, 0)"

# Whether an audit of this database is running.
IS_LOCKED = f"""
SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND granted AND classid = {Lock.AUDIT} AND objid = 0
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))
"""

BATCH_SIZE = 1000  # rows in one INSERT
MINUTES_KEPT = 24 * 60  # of each backlog
DETAILS_KEPT = timedelta(days=14)  # latency by the minute

DIED = "Its process ended before it had finished."
SUPERSEDED = "A later audit marked this one as dead, because its process was frozen or lost its database connection."


@contextmanager
def audit_lock(using: str) -> Iterator[None]:
    """
    Hold the lock of a database's audit. Runs in state RUNNING are marked as dead.

    Raises:
        AuditRunning: another audit holds the lock.
    """
    with database.connect_session(using, application_name="outbox audit run") as connection:
        if connection.execute(TRY_LOCK).fetchone() != (True,):
            run = AuditRun.objects.using(using).filter(state=AuditRun.RunState.RUNNING).order_by("-id").first()
            since = f": run {run.pk}, on {run.host} since {run.started_at:%Y-%m-%d %H:%M:%S} UTC" if run else ""
            raise AuditRunning(
                f"An audit of database {using!r} is already running{since}.", hint="Wait for it, or stop its process."
            )
        connection.execute(END_IDLE_SESSION)
        _mark_dead(using)
        with keep_alive(connection):
            yield


def _mark_dead(using: str) -> None:
    """Mark runs in state RUNNING as dead; the caller holds the lock."""
    running = AuditRun.objects.using(using).filter(state=AuditRun.RunState.RUNNING)
    for run in running.order_by("id"):
        logger.warning("Audit %s of database %r died. %s It ran on %s as process %s.", run.pk, using, DIED, run.host, run.pid)
    running.update(state=AuditRun.RunState.DIED, ended_at=timezone.now(), error=DIED)


def state_of(run: AuditRun) -> str:
    """Return the state of a run: DIED if it says RUNNING and no audit holds the lock."""
    if run.state == AuditRun.RunState.RUNNING and not is_running(run._state.db or "default"):
        return AuditRun.RunState.DIED
    return run.state


def is_running(using: str) -> bool:
    """Return whether an audit of a database is running."""
    return database.raw(using).execute(IS_LOCKED).fetchone() == (True,)


def begin(
    using: str,
    *,
    asked_by: str,
    since: datetime | None,
    settle_seconds: float,
    state: AuditRun.RunState = AuditRun.RunState.RUNNING,
) -> AuditRun:
    """Store a run that begins."""
    where = {"host": socket.gethostname(), "pid": os.getpid()}
    return AuditRun.objects.using(using).create(
        state=state, asked_by=asked_by, since=since, settle_seconds=settle_seconds, **where
    )


def skip(using: str, error: str) -> AuditRun:
    """Store that a run was skipped, and why."""
    run = begin(using, asked_by="beat", since=None, settle_seconds=0.0, state=AuditRun.RunState.SKIPPED)
    run.error, run.ended_at = cut(error), timezone.now()
    run.save()
    return run


def error_of(run: AuditRun) -> str:
    """Return why a run failed or died; "" if it did not."""
    return run.error or (DIED if state_of(run) == AuditRun.RunState.DIED else "")


def fail(run: AuditRun, error: str, exit_code: int | None) -> None:
    """Store that a run failed, and why."""
    run.state, run.error, run.exit_code, run.ended_at = AuditRun.RunState.FAILED, cut(error), exit_code, timezone.now()
    run.save()


def finish(run: AuditRun, report: Mapping[str, Any], exit_code: int) -> None:
    """
    Store the signed result of a run and delete old runs, in one transaction.

    Raises:
        AuditFailed: the run has been marked as dead meanwhile.
    """
    using = run._state.db or DEFAULT_DB_ALIAS
    with guarded.atomic(using):
        rows = AuditRun.objects.using(using).select_for_update().filter(pk=run.pk, state=AuditRun.RunState.RUNNING)
        if not rows.exists():
            raise AuditFailed(SUPERSEDED)
        _fill(run, report, exit_code)
        run.save()
        AuditFinding.objects.using(using).bulk_create(_findings(run, report["findings"]), batch_size=BATCH_SIZE)
        AuditBacklog.objects.using(using).bulk_create(_backlogs(run, report["backlog"]), batch_size=BATCH_SIZE)
        latencies = _latencies(run, report["latency"]["histograms"])
        while some := list(islice(latencies, BATCH_SIZE)):
            AuditLatency.objects.using(using).bulk_create(some)
        _prune(run)


def _fill(run: AuditRun, report: Mapping[str, Any], exit_code: int) -> None:
    # An incomplete lake makes it later than in the configuration.
    run.since = datetime.fromisoformat(report["since"]) if report["since"] else None
    summary = verdict.verdict_of(report, run=run.pk, since=run.since, settle_seconds=run.settle_seconds)
    run.verdict = verdict.serialize(summary)
    run.signature = verdict.sign(run.verdict)
    run.as_of = datetime.fromisoformat(report["as_of"])
    run.seconds, run.counts, run.found = report["seconds"], report["counts"], len(report["findings"])
    run.code_version, run.data_digest = report["code_version"], report["digest"]
    run.state, run.error, run.exit_code, run.ended_at = AuditRun.RunState.DONE, "", exit_code, timezone.now()


def _findings(run: AuditRun, found: Sequence[Mapping[str, Any]]) -> list[AuditFinding]:
    same = ("kind", "stage", "topic", "source", "lane", "subject", "count", "about", "text")
    return [
        AuditFinding(
            run=run,
            consumer_group=finding["group"],
            first_number=finding["first"],
            last_number=finding["last"],
            message_ids=finding["ids"],
            **{name: finding[name] for name in same},
        )
        for finding in found
    ]


def _latencies(run: AuditRun, rows: Sequence[Sequence[Any]]) -> Iterator[AuditLatency]:
    bins: dict[tuple[str, str, str, int], list[tuple[int, int]]] = defaultdict(list)
    for topic, hop, group, seconds, place, n in rows:
        bins[topic, hop, group, seconds].append((place, n))
    for (topic, hop, group, seconds), counts in sorted(bins.items()):
        places, numbers = zip(*sorted(counts), strict=True)
        minute = datetime.fromtimestamp(seconds, UTC)
        yield AuditLatency(
            run=run, topic=topic, hop=hop, consumer_group=group, minute=minute, bins=list(places), counts=list(numbers)
        )


def _backlogs(run: AuditRun, rows: Sequence[Mapping[str, Any]]) -> list[AuditBacklog]:
    return [
        AuditBacklog(
            run=run,
            consumer_group=row["group"],
            topic=row["topic"],
            backlog=row["backlog"],
            growth=row["growth"],
            cause=row["cause"],
            onset_at=datetime.fromisoformat(row["onset"]) if row["onset"] else None,
            most_repeated=row["most_repeated"],
            minutes=[[seconds, backlog] for seconds, backlog, *_ in row["minutes"][-MINUTES_KEPT:]],
        )
        for row in rows
    ]


def _prune(run: AuditRun) -> None:
    """Delete runs that are older than `OUTBOX["PIPELINE"]["AUDIT_RETENTION"]`, and latencies older than `DETAILS_KEPT`."""
    runs = AuditRun.objects.using(run._state.db).exclude(pk=run.pk)
    now = timezone.now()
    runs.filter(started_at__lt=now - settings().audit_retention).delete()
    AuditLatency.objects.using(run._state.db).filter(run__in=runs.filter(started_at__lt=now - DETAILS_KEPT)).delete()
