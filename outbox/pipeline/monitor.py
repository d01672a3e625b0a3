"""The monitor, seen from Django: its job as a process, and how each lane stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Q
from django.db.models.functions import Now

from outbox.pipeline.errors import MonitorFailed
from outbox.pipeline.job_config import pipeline_config
from outbox.pipeline.models import MonitorLane
from outbox.pipeline.spark.process import Say, run_job

JOB = "outbox.pipeline.spark.jobs.monitor"
CANNOT = "The monitor cannot go on: "  # how the job begins the line that says why


@dataclass(frozen=True, slots=True)
class LaneStatus:
    """How the outbox (`group` empty) or a group stands with a lane; see `MonitorLane`. Lane None: messages without a number."""

    topic: str
    group: str
    source: str
    lane: int | None
    seen: int
    missing: int | None
    duplicates: int
    failed: int
    highest: int | None
    first_missing: int | None
    first_missing_since: datetime | None

    def as_json(self) -> dict[str, Any]:
        """Return the same as JSON knows it."""
        since = self.first_missing_since
        return asdict(self) | {"first_missing_since": since.isoformat() if since else None}


def run_monitor(
    using: str,
    checkpoint: str,
    *,
    every: float | None = None,
    driver_memory: str = "1g",
    is_stopped: Callable[[], bool] = lambda: False,
    say: Say,
) -> None:
    """
    Apply what was written since the last time, by Spark in a process of its own.

    Args:
        checkpoint: the folder that says how far it has come.
        every: go on until `is_stopped`, a micro-batch each so many seconds.
        say: is given what the job says, line by line.

    Raises:
        MonitorFailed: it could not go on. Nothing is counted twice when it is run again.
    """
    config = pipeline_config(using, reader="python", settle=timedelta(), driver_memory=driver_memory)
    more = [] if every is None else ["--every", str(every)]
    told = config.to_json()
    ended = run_job(JOB, told, "--checkpoint", checkpoint, *more, has_report=False, is_stopped=is_stopped, say=say)
    if ended.exit_code != 0:
        raise MonitorFailed(f"The monitor could not go on{ended.why(CANNOT)}")


def standings(using: str) -> list[LaneStatus]:
    """Return how each lane stands, as of the last micro-batch."""
    return [_standing(row) for row in _rows(using)]


def late(using: str, settle: timedelta) -> list[LaneStatus]:
    """Return those where the same number has been missing for longer than the settle time, by the database's clock."""
    is_late = Q(missing__gt=0) & Q(first_missing_since__lt=Now() - settle)
    return [_standing(row) for row in _rows(using).filter(is_late)]


def _rows(using: str) -> Any:
    return MonitorLane.objects.using(using).order_by("topic", "consumer_group", "source", "lane")


def _standing(row: MonitorLane) -> LaneStatus:
    return LaneStatus(
        topic=row.topic,
        group=row.consumer_group,
        source=row.source,
        lane=row.lane if row.lane >= 0 else None,
        seen=row.seen,
        missing=row.missing,
        duplicates=row.duplicates,
        failed=row.failed,
        highest=row.highest,
        first_missing=row.first_missing,
        first_missing_since=row.first_missing_since,
    )
