"""Run an audit and store its signed result, for the command and for the scheduled task."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from outbox import database, signals
from outbox.errors import OutboxError
from outbox.logs import get_logger
from outbox.pipeline.audit_runs import job, store, verdict
from outbox.pipeline.audit_runs.new_findings import new_findings
from outbox.pipeline.errors import AuditFailed, AuditRunning
from outbox.pipeline.job_config import pipeline_config
from outbox.pipeline.models import AuditRun
from outbox.pipeline.spark.config import PipelineConfig, Reader
from outbox.pipeline.spark.errors import PipelineError
from outbox.pipeline.spark.process import Log
from outbox.pipeline.spark.session import find_jar

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
            result = job.run_job(config, history=history, at_most=at_most, log=log)
            database.drop_if_lost(using)  # it may have been closed as idle
            if result.report is None:
                raise AuditFailed(job.explain(result))
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
