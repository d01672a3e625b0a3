"""
Run an audit in a child process, store its signed result, and send an alert of findings that are new.

    pipeline_config -> run_job (Spark) -> report -> verdict, stored run -> new findings? -> alert

A nightly audit finds an old loss every night, but alerts only once. A running audit holds an advisory lock on a separate
connection. So there is one audit at a time, and a run in state RUNNING without that lock has died.
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
from django.db.models import Q
from django.utils import timezone

from outbox import database, signals
from outbox.database import guarded
from outbox.database.locks import END_IDLE_SESSION, Lock
from outbox.errors import OutboxError
from outbox.logs import cut, get_logger
from outbox.pipeline import verdict
from outbox.pipeline.conf import settings
from outbox.pipeline.errors import AuditFailed, AuditRunning
from outbox.pipeline.job_config import pipeline_config
from outbox.pipeline.models import AuditBacklog, AuditFinding, AuditLatency, AuditRun
from outbox.pipeline.spark import PipelineError
from outbox.pipeline.spark.config import PipelineConfig, Reader
from outbox.pipeline.spark.findings import FindingKind
from outbox.pipeline.spark.jobs import Log, run_job
from outbox.pipeline.spark.session import find_jar
from outbox.pipeline.spark.statements import keep_alive

logger = get_logger(__name__)

TRY_LOCK = f"SELECT pg_try_advisory_lock({Lock.AUDIT}, 0)"

# Whether an audit of this database is running.
IS_LOCKED = f"""
SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND granted AND classid = {Lock.AUDIT} AND objid = 0
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))
"""

BATCH_SIZE = 1000  # rows in one INSERT
MINUTES_KEPT = 24 * 60  # of each backlog
DETAILS_KEPT = timedelta(days=14)  # latency

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
    if run.state != AuditRun.RunState.RUNNING:
        return run.state
    is_locked = database.raw(run._state.db or DEFAULT_DB_ALIAS).execute(IS_LOCKED).fetchone() == (True,)
    return AuditRun.RunState.RUNNING if is_locked else AuditRun.RunState.DIED


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


# These kinds are about each message by itself, others about several.
OF_EACH = (FindingKind.LOST, FindingKind.LATE, FindingKind.ORPHAN)


def new_findings(run: AuditRun) -> list[AuditFinding]:
    """
    Return the findings of a run that are not known from earlier runs.

    A finding is known if the newest earlier run that went as far back has it, or a run since then, or if an operator has
    acknowledged it in any run. A finding whose messages were sent again is new when it is found once more.
    """
    using = run._state.db
    earlier = AuditRun.objects.using(using).filter(state=AuditRun.RunState.DONE, pk__lt=run.pk)
    as_far_back = Q(since=None) if run.since is None else Q(since=None) | Q(since__lte=run.since)
    newest = earlier.filter(as_far_back).order_by("-pk").values_list("pk", flat=True).first() or 0
    is_open = Q(run__gte=newest, resent_at=None) | ~Q(acknowledged_at=None)
    known: dict[tuple[Any, ...], list[AuditFinding]] = defaultdict(list)
    for known_finding in AuditFinding.objects.using(using).filter(is_open, run__in=earlier):
        known[_place(known_finding)].append(known_finding)
    same = {_whole(finding) for findings in known.values() for finding in findings}  # nearly all of them, after the first night
    others = (finding for finding in run.findings.order_by("pk") if _whole(finding) not in same)
    return [finding for finding in others if not _is_covered(finding, known[_place(finding)])]


def _is_covered(one: AuditFinding, before: Sequence[AuditFinding]) -> bool:
    """Return whether earlier findings at the same location contain all messages of a finding."""
    if one.kind not in OF_EACH:
        return False
    if one.first_number is not None and one.last_number is not None:
        return any(_has_all(other, one.first_number, one.last_number) for other in before)
    named = _names(one)
    return len(named) == one.count and named <= {name for other in before for name in _names(other)}


def _place(one: AuditFinding) -> tuple[Any, ...]:
    return one.kind, one.stage, one.topic, one.source, one.lane, one.consumer_group, one.subject


def _whole(one: AuditFinding) -> tuple[Any, ...]:
    return *_place(one), one.text, frozenset(_names(one))


def _names(one: AuditFinding) -> set[str]:
    return {*one.message_ids, *one.about}


def _has_all(one: AuditFinding, first: int, last: int) -> bool:
    """Return whether a finding contains all of these numbers."""
    if one.first_number is None or one.last_number is None or one.last_number - one.first_number + 1 != one.count:
        return False
    return one.first_number <= first and last <= one.last_number


SETTLE = timedelta(minutes=5)  # the command's default, too

MAX_OUTPUT_CHARACTERS = 20_000  # characters


def run_and_store(
    using: str,
    config: PipelineConfig,
    *,
    asked_by: str,
    log: Log,
    history: str = "",
    at_most: timedelta | None = None,
) -> tuple[AuditRun, dict[str, Any]]:
    """
    Run an audit and store its findings. Return the run and the report.

    Raises:
        AuditRunning: another audit of this database is running.
        AuditFailed: the job failed. Its run is stored with the reason.
        ConfigurationError: the signing key in the environment is not valid.
    """
    verdict.keys()  # raises now, not after an hour's work
    with audit_lock(using):
        run = begin(using, asked_by=asked_by, since=config.since, settle_seconds=config.settle_seconds)
        try:
            result = run_job("audit", config.to_json(), "--history", history, at_most=at_most, log=log)
            database.drop_if_lost(using)  # it may have been closed as idle
            if result.report is None:
                raise AuditFailed(f"The audit failed{result.failure()}")
            finish(run, result.report, result.exit_code)
        except AuditFailed as error:
            fail(run, f"{error}\n\n{result.log_tail[-MAX_OUTPUT_CHARACTERS:]}", result.exit_code)
            raise
        except BaseException as error:
            fail(run, f"{type(error).__name__}: {error}", None)
            raise
        return run, result.report


def run_for_beat(using: str, *, at_most: timedelta, archived: bool = False) -> None:
    """
    Run an audit in the background. A failure is stored with the run, and sends an alert, as new findings do.

    If another audit of this database is running, this one is stored as skipped, and logged.

    Args:
        archived: also audit archived days.
    """
    try:
        config = pipeline_config(using, reader=_reader(), settle=SETTLE, archived=archived)
        run, report = run_and_store(using, config, asked_by="beat", log=logger.debug, at_most=at_most)
    except AuditRunning as error:
        logger.warning("The audit of database %r was skipped. %s", using, error)
        skip(using, str(error))
    except AuditFailed as error:
        _send_alert(using, f"The audit of database {using!r} failed. {error}")
    except OutboxError as error:  # an error in settings or key, before the run was stored
        fail(begin(using, asked_by="beat", since=None, settle_seconds=SETTLE.total_seconds()), str(error), None)
        _send_alert(using, f"The audit of database {using!r} cannot run. {error}")
    else:
        count = len(report["findings"])
        if new := len(new_findings(run)):
            _send_alert(using, f"New findings of audit {run.pk} of database {using!r}: {new} of {count}. See the admin.")
        elif count:
            logger.warning("Findings of audit %s of database %r: %s, none of them new. See the admin.", run.pk, using, count)


def _reader() -> Reader:
    try:
        find_jar()
    except PipelineError:
        return "python"
    return "jdbc"


def _send_alert(using: str, reason: str) -> None:
    logger.error(reason)
    signals.alert.send_robust(sender=AuditRun, reason=reason, details={"database": using})
