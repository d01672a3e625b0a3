"""
Run an audit in a child process, store its signed result, and send an alert if there are new findings.

    pipeline_config -> run_job (Spark) -> report -> verdict, stored run -> new findings? -> alert

A nightly audit finds an old loss every night, but sends an alert about it only once. A running audit holds an advisory lock of
its database, on a separate connection. So only one audit runs at a time, and a run in state RUNNING has died if the lock is free.
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

# Whether an audit of this database is running, on any machine.
IS_LOCKED = f"""
SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND granted AND classid = {Lock.AUDIT} AND objid = 0
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))
"""

BATCH_SIZE = 1000  # rows in one INSERT
BACKLOG_MINUTES_KEPT = 24 * 60  # of each backlog, the newest ones
LATENCIES_KEPT = timedelta(days=14)

DIED = "Its process ended before the audit had finished."
SUPERSEDED = "A later audit marked this one as dead, because its process was frozen or lost its database connection."


@contextmanager
def audit_lock(using: str) -> Iterator[None]:
    """
    Hold the audit lock of a database. Runs that are still in state RUNNING are marked as dead.

    Raises:
        AuditRunning: another audit holds the lock.
    """
    with database.connect_session(using, application_name="outbox audit run") as connection:
        if connection.execute(TRY_LOCK).fetchone() != (True,):
            run = AuditRun.objects.using(using).filter(state=AuditRun.RunState.RUNNING).order_by("-id").first()
            began = database.aware(run.started_at).astimezone(UTC) if run else None
            since = f": run {run.pk}, on {run.host} since {began:%Y-%m-%d %H:%M:%S} UTC" if run else ""
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
    """Return the state of a run: DIED if it is stored as RUNNING and no audit holds the lock."""
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
    """Store a new run, and return it."""
    process = {"host": socket.gethostname(), "pid": os.getpid()}
    return AuditRun.objects.using(using).create(
        state=state, asked_by=asked_by, since=since, settle_seconds=settle_seconds, **process
    )


def skip(using: str, error: str) -> AuditRun:
    """Store a run that was skipped, with the reason, and return it."""
    run = begin(using, asked_by="beat", since=None, settle_seconds=0.0, state=AuditRun.RunState.SKIPPED)
    run.error, run.ended_at = cut(error), timezone.now()
    run.save()
    return run


def error_of(run: AuditRun) -> str:
    """Return why a run failed or died; "" if it did not."""
    return run.error or (DIED if state_of(run) == AuditRun.RunState.DIED else "")


def fail(run: AuditRun, error: str, exit_code: int | None) -> None:
    """Store that a run failed, with the reason."""
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
        _fill_in(run, report, exit_code)
        run.save()
        AuditFinding.objects.using(using).bulk_create(_findings(run, report["findings"]), batch_size=BATCH_SIZE)
        AuditBacklog.objects.using(using).bulk_create(_backlogs(run, report["backlog"]), batch_size=BATCH_SIZE)
        latencies = _latencies(run, report["latency"]["histograms"])
        while some := list(islice(latencies, BATCH_SIZE)):
            AuditLatency.objects.using(using).bulk_create(some)
        _prune(run)


def _fill_in(run: AuditRun, report: Mapping[str, Any], exit_code: int) -> None:
    # The report's `since` is later than that of the configuration if the lake is incomplete.
    run.since = datetime.fromisoformat(report["since"]) if report["since"] else None
    summary = verdict.verdict_of(report, run=run.pk, since=run.since, settle_seconds=run.settle_seconds)
    run.verdict = verdict.serialize(summary)
    run.signature = verdict.sign(run.verdict)
    run.as_of = datetime.fromisoformat(report["as_of"])
    run.seconds, run.counts, run.found = report["seconds"], report["counts"], len(report["findings"])
    run.code_version, run.data_digest = report["code_version"], report["digest"]
    run.state, run.error, run.exit_code, run.ended_at = AuditRun.RunState.DONE, "", exit_code, timezone.now()


def _findings(run: AuditRun, findings: Sequence[Mapping[str, Any]]) -> list[AuditFinding]:
    same_names = ("kind", "stage", "topic", "source", "lane", "subject", "count", "about", "text")
    return [
        AuditFinding(
            run=run,
            consumer_group=finding["group"],
            first_number=finding["first"],
            last_number=finding["last"],
            message_ids=finding["ids"],
            **{name: finding[name] for name in same_names},
        )
        for finding in findings
    ]


def _latencies(run: AuditRun, rows: Sequence[Sequence[Any]]) -> Iterator[AuditLatency]:
    bins: dict[tuple[str, str, str, int], list[tuple[int, int]]] = defaultdict(list)
    for topic, hop, group, seconds, bin_number, n in rows:
        bins[topic, hop, group, seconds].append((bin_number, n))
    for (topic, hop, group, seconds), counts in sorted(bins.items()):
        bin_numbers, numbers = zip(*sorted(counts), strict=True)
        minute = datetime.fromtimestamp(seconds, UTC)
        yield AuditLatency(
            run=run, topic=topic, hop=hop, consumer_group=group, minute=minute, bins=list(bin_numbers), counts=list(numbers)
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
            minutes=[[seconds, backlog] for seconds, backlog, *_ in row["minutes"][-BACKLOG_MINUTES_KEPT:]],
        )
        for row in rows
    ]


def _prune(run: AuditRun) -> None:
    """
    Delete runs that are older than `OUTBOX["PIPELINE"]["AUDIT_RETENTION"]`, and latencies that are older than `LATENCIES_KEPT`.
    """
    runs = AuditRun.objects.using(run._state.db).exclude(pk=run.pk)
    now = timezone.now()
    runs.filter(started_at__lt=now - settings().audit_retention).delete()
    AuditLatency.objects.using(run._state.db).filter(run__in=runs.filter(started_at__lt=now - LATENCIES_KEPT)).delete()


# A finding of one of these kinds holds for each of its messages alone. One of another kind holds for its messages together.
KINDS_OF_SINGLE_MESSAGES = (FindingKind.LOST, FindingKind.LATE, FindingKind.ORPHAN)


def new_findings(run: AuditRun) -> list[AuditFinding]:
    """
    Return the findings of a run that are not known from earlier runs.

    A finding is known if an operator has acknowledged it in any earlier run. It is also known if it is in the newest earlier run
    that went at least as far back in time, or in a run between that one and this one, unless its messages were sent again since.
    """
    using = run._state.db
    earlier = AuditRun.objects.using(using).filter(state=AuditRun.RunState.DONE, pk__lt=run.pk)
    as_far_back = Q(since=None) if run.since is None else Q(since=None) | Q(since__lte=run.since)
    newest = earlier.filter(as_far_back).order_by("-pk").values_list("pk", flat=True).first() or 0
    is_known = Q(run__gte=newest, resent_at=None) | ~Q(acknowledged_at=None)
    known_at: dict[tuple[Any, ...], list[AuditFinding]] = defaultdict(list)
    for known_finding in AuditFinding.objects.using(using).filter(is_known, run__in=earlier):
        known_at[_location(known_finding)].append(known_finding)
    identities = {_identity(finding) for findings in known_at.values() for finding in findings}
    # This cheap comparison excludes nearly all findings, because most of them were already found the night before.
    candidates = (finding for finding in run.findings.order_by("pk") if _identity(finding) not in identities)
    return [finding for finding in candidates if not _is_covered(finding, known_at[_location(finding)])]


def _is_covered(finding: AuditFinding, earlier: Sequence[AuditFinding]) -> bool:
    """Return whether earlier findings at the same location contain all messages of a finding."""
    if finding.kind not in KINDS_OF_SINGLE_MESSAGES:
        return False
    if finding.first_number is not None and finding.last_number is not None:
        return any(_has_all(other, finding.first_number, finding.last_number) for other in earlier)
    names = _message_names(finding)
    return len(names) == finding.count and names <= {name for other in earlier for name in _message_names(other)}


def _location(finding: AuditFinding) -> tuple[Any, ...]:
    kind, stage = finding.kind, finding.stage
    return kind, stage, finding.topic, finding.source, finding.lane, finding.consumer_group, finding.subject


def _identity(finding: AuditFinding) -> tuple[Any, ...]:
    return *_location(finding), finding.text, frozenset(_message_names(finding))


def _message_names(finding: AuditFinding) -> set[str]:
    return {*finding.message_ids, *finding.about}


def _has_all(finding: AuditFinding, first: int, last: int) -> bool:
    """Return whether a finding contains all these numbers; False if it has gaps, because it is unknown where they are."""
    if finding.first_number is None or finding.last_number is None:
        return False
    if finding.last_number - finding.first_number + 1 != finding.count:
        return False
    return finding.first_number <= first and last <= finding.last_number


SETTLE = timedelta(minutes=5)  # also the default of outbox_audit

MAX_OUTPUT_CHARACTERS = 20_000  # of the job's log, stored with a run that failed


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
    verdict.keys()  # raises the error now, and not after an audit of an hour
    with audit_lock(using):
        run = begin(using, asked_by=asked_by, since=config.since, settle_seconds=config.settle_seconds)
        try:
            result = run_job("audit", config.to_json(), "--history", history, at_most=at_most, log=log)
            database.drop_if_lost(using)  # the server may have closed the connection as idle
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
    Run an audit as a scheduled task. A failure is stored with the run and sends an alert, as new findings do.

    If another audit of this database is running, this one is logged, and stored as skipped.

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
    except OutboxError as error:  # an error in the settings or in the signing key; no run is stored yet
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
