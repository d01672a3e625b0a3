"""For which messages it is known whether the broker has them."""

from __future__ import annotations

from datetime import datetime, timedelta

from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.history import History, Recorded
from outbox.pipeline.spark.transforms.roles import Reach, Roles


def roles_of(config: PipelineConfig, history: History) -> Roles:
    """Return the rules by which rows become roles: the settle time, and the progress of the recorder."""
    cutoff = (history.brokers_as_of or history.as_of) - timedelta(seconds=config.settle_seconds)
    owed = {pair: micros(time) for pair, time in history.owed.items()}
    return Roles(config.groups, micros(cutoff), reaches(config, history), owed)


def reaches(config: PipelineConfig, history: History) -> dict[str, Reach]:
    """Return the reach of each topic that is not known for all times, reduced by the clocks' tolerance."""
    tolerance = timedelta(seconds=config.clock_tolerance_seconds)
    found = {}
    of_kafka = {topic for cluster in config.kafka for topic in cluster.topics}
    for topic in {**config.recorded, **history.recorded}:
        hidden_seconds = config.recorded.get(topic, 0.0)
        recorded = history.recorded.get(topic, Recorded(history.as_of, None))
        began = recorded.began + tolerance
        until = began if recorded.until is None else recorded.until - tolerance
        found[topic] = Reach(micros(began), micros(until), int(hidden_seconds * 1_000_000), topic in of_kafka)
    return found


def unread(recorded: Recorded | None) -> str:
    """Return the detail of a finding about messages of which it is not known yet whether the broker has them."""
    if recorded is not None and recorded.why:
        return recorded.why
    if recorded is None or recorded.until is None:
        return "not recorded yet; make sure that manage.py outbox_record is running"
    until = recorded.until.isoformat(timespec="seconds")
    return f"recorded only up to {until}; make sure that manage.py outbox_record is running"


def micros(time: datetime) -> int:
    """Return a time in microseconds since 1970."""
    return int(time.timestamp() * 1_000_000)
