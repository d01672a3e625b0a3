"""
Run an audit in a child process, store its signed result, and send an alert of findings that are new.

    pipeline_config -> run_job (Spark) -> report -> store, verdict -> new findings? -> alert

A nightly audit finds an old loss every night, but alerts only once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from django.db.models import Q

from outbox import database, signals
from outbox.errors import OutboxError
from outbox.logs import get_logger
from outbox.pipeline.audit_runs import store, verdict
from outbox.pipeline.errors import AuditFailed, AuditRunning
from outbox.pipeline.job_config import pipeline_config
from outbox.pipeline.models import AuditFinding, AuditRun
from outbox.pipeline.spark import process
from outbox.pipeline.spark.config import PipelineConfig, Reader
from outbox.pipeline.spark.errors import PipelineError
from outbox.pipeline.spark.findings import FindingKind
from outbox.pipeline.spark.process import Log
from outbox.pipeline.spark.session import find_jar

JOB = "outbox.pipeline.spark.jobs.audit"
ERROR_PREFIX = "Audit failed: "  # begins the line of the job's log that states the reason


def run_job(
    config: PipelineConfig, *, history: str = "", at_most: timedelta | None = None, log: process.Log
) -> process.JobResult:
    """
    Run the audit's job and wait for it.

    Args:
        history: a folder to keep the history in that was read; empty: do not keep it.
        at_most: the time limit.
        log: called with each line of the job's log.
    """
    return process.run_job(JOB, config.to_json(), "--history", history, at_most=at_most, log=log)


def explain(result: process.JobResult) -> str:
    """Return the reason of a failure in one line."""
    return f"The audit failed{result.failure(ERROR_PREFIX)}"


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
    for one in AuditFinding.objects.using(using).filter(is_open, run__in=earlier):
        known[_place(one)].append(one)
    return [finding for finding in run.findings.order_by("pk") if not is_known(finding, known[_place(finding)])]


def is_known(one: AuditFinding, before: Sequence[AuditFinding]) -> bool:
    """Return whether earlier findings at the same location cover a finding: they are equal, or contain all its messages."""
    if any(_whole(one) == _whole(other) for other in before):
        return True
    if one.kind not in OF_EACH:
        return False
    if one.first_number is not None and one.last_number is not None:
        return any(_has_all(other, one.first_number, one.last_number) for other in before)
    named = _names(one)
    return len(named) == one.count and named <= {name for other in before for name in _names(other)}


def _place(one: AuditFinding) -> tuple[Any, ...]:
    return one.kind, one.stage, one.topic, one.source, one.lane, one.consumer_group, one.subject


def _whole(one: AuditFinding) -> tuple[Any, ...]:
    return one.text, _names(one)


def _names(one: AuditFinding) -> set[str]:
    return {*one.message_ids, *one.about}


def _has_all(one: AuditFinding, first: int, last: int) -> bool:
    """Return whether a finding contains all of these numbers."""
    if one.first_number is None or one.last_number is None or one.last_number - one.first_number + 1 != one.count:
        return False
    return one.first_number <= first and last <= one.last_number


logger = get_logger(__name__)

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
    with store.audit_lock(using):
        run = store.begin(using, asked_by=asked_by, since=config.since, settle_seconds=config.settle_seconds)
        try:
            result = run_job(config, history=history, at_most=at_most, log=log)
            database.drop_if_lost(using)  # it may have been closed as idle
            if result.report is None:
                raise AuditFailed(explain(result))
            store.finish(run, result.report, result.exit_code)
        except AuditFailed as error:
            store.fail(run, f"{error}\n\n{result.log_tail[-MAX_OUTPUT_CHARACTERS:]}", result.exit_code)
            raise
        except BaseException as error:
            store.fail(run, f"{type(error).__name__}: {error}", None)
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
        store.skip(using, str(error))
    except AuditFailed as error:
        _send_alert(using, f"The audit of database {using!r} failed. {error}")
    except OutboxError as error:  # an error in settings or key, before the run was stored
        store.fail(store.begin(using, asked_by="beat", since=None, settle_seconds=SETTLE.total_seconds()), str(error), None)
        _send_alert(using, f"The audit of database {using!r} cannot run. {error}")
    else:
        _alert_new_findings(using, run, len(report["findings"]))


def _alert_new_findings(using: str, run: AuditRun, found: int) -> None:
    """Send an alert for new findings; log known ones."""
    if new := len(new_findings(run)):
        _send_alert(using, f"New findings of audit {run.pk} of database {using!r}: {new} of {found}. See the admin.")
    elif found:
        logger.warning("Findings of audit %s of database %r: %s, none of them new. See the admin.", run.pk, using, found)


def _reader() -> Reader:
    try:
        find_jar()
    except PipelineError:
        return "python"
    return "jdbc"


def _send_alert(using: str, reason: str) -> None:
    logger.error(reason)
    signals.alert.send_robust(sender=AuditRun, reason=reason, details={"database": using})
