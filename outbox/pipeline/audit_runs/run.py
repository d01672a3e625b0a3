"""One audit, from the settings to its stored and signed answer: what the command and the nightly task both do."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from outbox import database, signals
from outbox.errors import OutboxError
from outbox.logs import get_logger
from outbox.pipeline.audit_runs import job, known, store, verdict
from outbox.pipeline.errors import AuditFailed, AuditRunning
from outbox.pipeline.job_config import pipeline_config
from outbox.pipeline.models import AuditRun
from outbox.pipeline.spark.config import PipelineConfig, Reader
from outbox.pipeline.spark.errors import PipelineError
from outbox.pipeline.spark.process import Say
from outbox.pipeline.spark.session import find_jar

logger = get_logger(__name__)

SETTLE = timedelta(minutes=5)  # as the command's default

WORDS_KEPT = 20_000  # characters


def run_and_store(
    using: str,
    config: PipelineConfig,
    *,
    asked_by: str,
    say: Say,
    history: str = "",
    at_most: timedelta | None = None,
) -> tuple[AuditRun, dict[str, Any]]:
    """
    Run an audit and store what it found; give its run and report.

    Raises:
        AuditRunning: another one of this database runs.
        AuditFailed: it gave no answer. Its run is stored all the same.
        ConfigurationError: the key in the environment cannot sign.
    """
    verdict.keys()  # not after an hour's work
    with store.alone(using):
        run = store.begin(using, asked_by=asked_by, since=config.since, settle_seconds=config.settle_seconds)
        try:
            ended = job.run_job(config, history=history, at_most=at_most, say=say)
            database.drop_if_lost(using)  # it was idle all the while
            if ended.report is None:
                raise AuditFailed(job.explain(ended))
            store.finish(run, ended.report, ended.exit_code)
        except AuditFailed as error:
            store.fail(run, f"{error}\n\n{ended.words[-WORDS_KEPT:]}", ended.exit_code)
            raise
        except BaseException as error:
            store.fail(run, f"{type(error).__name__}: {error}", None)
            raise
        return run, ended.report


def run_for_beat(using: str, *, at_most: timedelta, archived: bool = False) -> None:
    """
    Run an audit that nobody waits for: what keeps it from an answer is its run's error, and is alerted as new findings are.

    Where another one of this database runs, it is skipped, which is written down and logged.

    Args:
        archived: what was archived is audited, too.
    """
    try:
        config = pipeline_config(using, reader=_reader(), settle=SETTLE, archived=archived)
        run, report = run_and_store(using, config, asked_by="beat", say=logger.debug, at_most=at_most)
    except AuditRunning as error:
        logger.warning("The audit of database %r is skipped. %s", using, error)
        store.skip(using, str(error))
    except AuditFailed as error:
        _send_alert(using, f"The audit of database {using!r} failed. {error}")
    except OutboxError as error:  # settings or key: there is no run yet
        store.fail(store.begin(using, asked_by="beat", since=None, settle_seconds=SETTLE.total_seconds()), str(error), None)
        _send_alert(using, f"The audit of database {using!r} cannot run. {error}")
    else:
        _tell_news(using, run, len(report["findings"]))


def _tell_news(using: str, run: AuditRun, found: int) -> None:
    """Send an alert once for what is found each night."""
    if new := len(known.news(run)):
        _send_alert(using, f"Audit {run.pk} of database {using!r} has {new} new findings, {found} in all: see the admin.")
    elif found:
        logger.warning("Audit %s of database %r has %s findings, all known before: see the admin.", run.pk, using, found)


def _reader() -> Reader:
    try:
        find_jar()
    except PipelineError:
        return "python"
    return "jdbc"


def _send_alert(using: str, reason: str) -> None:
    logger.error(reason)
    signals.alert.send_robust(sender=AuditRun, reason=reason, details={"database": using})
