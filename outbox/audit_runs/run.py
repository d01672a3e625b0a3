"""One audit, from the settings to its stored and signed answer: what the command and the nightly task both do."""

from __future__ import annotations

import signal
from datetime import timedelta
from typing import Any

from outbox import database
from outbox.audit_runs import job, store, verdict
from outbox.errors import AuditFailed
from outbox.models import AuditRun
from outbox.pipeline.config import PipelineConfig

WORDS_KEPT = 20_000  # characters
NO_ANSWER = "No answer: "  # how the job begins the line that says why


def run_and_store(
    using: str,
    config: PipelineConfig,
    *,
    asked_by: str,
    say: job.Say,
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
                raise AuditFailed(explain(ended, at_most))
            store.finish(run, ended.report, ended.exit_code)
        except AuditFailed as error:
            store.fail(run, f"{error}\n\n{ended.words[-WORDS_KEPT:]}", ended.exit_code)
            raise
        except BaseException as error:
            store.fail(run, f"{type(error).__name__}: {error}", None)
            raise
        return run, ended.report


def explain(ended: job.Ended, at_most: timedelta | None) -> str:
    """Say in one line why there is no answer."""
    if ended.is_stopped:
        return f"The audit gave no answer: it was stopped after {at_most}."
    if ended.exit_code < 0:
        return f"The audit gave no answer: its process was ended by {signal.Signals(-ended.exit_code).name}."
    said = next((line for line in reversed(ended.words.splitlines()) if line.startswith(NO_ANSWER)), "")
    return f"The audit gave no answer (exit code {ended.exit_code}). {said.removeprefix(NO_ANSWER)}".rstrip()
