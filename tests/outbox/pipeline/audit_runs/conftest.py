"""Audits whose job is a stand-in."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outbox.pipeline.audit_runs import job

KEY = "k" * 40


@pytest.fixture
def job_that(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have the job do that; see `stand_in`."""

    def job_that(does: str) -> None:
        monkeypatch.setattr(job, "JOB", "tests.outbox.pipeline.audit_runs.stand_in")
        monkeypatch.setenv("OUTBOX_TEST_JOB", does)

    return job_that


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OUTBOX_AUDIT_KEY", KEY)
    return KEY
