"""Topics whose broker side the recorder wrote down: how far they can be judged there."""

from __future__ import annotations

from datetime import datetime, timedelta

from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.history import History, Recorded
from outbox.pipeline.spark.transforms.roles import Reach, Roles


def roles_of(config: PipelineConfig, history: History) -> Roles:
    """Return how rows become roles: by the settle time, and by how far the recorder had come."""
    cutoff = history.as_of - timedelta(seconds=config.settle_seconds)
    owed = {pair: micros(time) for pair, time in history.owed.items()}
    live = config.archived.live_since if config.archived else None
    return Roles(config.groups, micros(cutoff), reaches(config, history), owed, micros(live) if live else 0)


def reaches(config: PipelineConfig, history: History) -> dict[str, Reach]:
    """Return the reach of each topic that is not known for all times, by as much narrower as clocks may differ."""
    tolerance = timedelta(seconds=config.clock_tolerance_seconds)
    found = {}
    for topic in {**config.recorded, **history.recorded}:
        hidden_seconds = config.recorded.get(topic, 0.0)
        recorded = history.recorded.get(topic, Recorded(history.as_of, None))
        began = recorded.began + tolerance
        until = began if recorded.until is None else recorded.until - tolerance
        found[topic] = Reach(micros(began), micros(until), int(hidden_seconds * 1_000_000))
    return found


def unread(recorded: Recorded | None) -> str:
    """Return up to when it is known what the broker has."""
    if recorded is None or recorded.until is None:
        return "not recorded yet; see that manage.py outbox_record runs"
    return f"recorded up to {recorded.until.isoformat(timespec='seconds')} only; see that manage.py outbox_record runs"


def micros(time: datetime) -> int:
    """Return a time in microseconds since 1970."""
    return int(time.timestamp() * 1_000_000)
