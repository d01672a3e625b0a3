"""Audits whose job is a stand-in, an archive, and lanes that the monitor has counted."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from outbox.models import State
from outbox.pipeline.audit_runs import job
from outbox.pipeline.models import MonitorLane
from tests.factories import BatchFactory, MessageRowFactory, message_id
from tests.outbox.pipeline.spark.archive.conftest import FIRST, SECOND, ids

KEY = "k" * 40

__all__ = ["ids"]  # a fixture


@pytest.fixture
def job_that(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that puts a stand-in for the job in place, which does what it is told; see `stand_in`."""

    def job_that(does: str) -> None:
        monkeypatch.setattr(job, "JOB", "tests.outbox.pipeline.audit_runs.stand_in")
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


@pytest.fixture
def lanes(db: None) -> None:
    """One lane whose missing number is late, one where it may be under way, and messages without a number."""
    now = timezone.now()
    of = {"source": "us", "topic": "orders", "seen": 9, "highest": 12}
    for group, minutes in (("late", 6), ("under-way", 4)):
        since = now - timedelta(minutes=minutes)
        MonitorLane.objects.create(**of, consumer_group=group, lane=1, missing=2, first_missing=7, first_missing_since=since)
    MonitorLane.objects.create(**of, consumer_group="", lane=-1)


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No job can start Spark."""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
