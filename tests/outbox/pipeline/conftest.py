"""Audits whose job is a stand-in, and an archive."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from outbox.models import State
from outbox.pipeline.spark import jobs
from tests.factories import BatchFactory, MessageRowFactory, message_id
from tests.outbox.pipeline.spark.archive.conftest import FIRST, SECOND, ids

KEY = "k" * 40

__all__ = ["ids"]  # a fixture


@pytest.fixture
def job_that(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that puts a stand-in for the job in place, which does what it is told; see `stand_in`."""

    def job_that(does: str) -> None:
        monkeypatch.setattr(jobs, "MODULE", "tests.outbox.pipeline.stand_in")
        monkeypatch.setenv("OUTBOX_TEST_JOB", does)

    return job_that


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OUTBOX_AUDIT_KEY", KEY)
    return KEY


@pytest.fixture
def with_archive(settings: Any, tmp_path: Path) -> Path:
    settings.OUTBOX = {**settings.OUTBOX, "PIPELINE": {"ARCHIVE": {"PATH": str(tmp_path / "lake")}}}
    return tmp_path / "lake"


@pytest.fixture
def held(ids: list[str], with_archive: Path) -> None:
    """Both days hold a message that is being sent."""
    for day in (FIRST, SECOND):
        row = MessageRowFactory(id=message_id(datetime(day.year, day.month, day.day, 23, tzinfo=UTC)))
        BatchFactory(message_ids=[row.id], state=State.CLAIMED)
