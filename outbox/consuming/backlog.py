"""What waits for the project's consumer groups, as their brokers count it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from outbox import conf
from outbox.consuming.register import groups
from outbox.errors import BrokerUnavailable


@dataclass(frozen=True, slots=True)
class Backlog:
    """
    Messages of a topic that wait for a group, those being handled included.

    Args:
        messages: None where the broker cannot be asked; `trouble` says why, and `topic` is empty.
    """

    consumer_group: str
    broker: str
    topic: str
    messages: int | None
    trouble: str = ""


def read_backlogs() -> list[Backlog]:
    """Ask the brokers of all consumer groups; a group that never received has no backlog yet."""
    return [one for group in groups().values() for alias in sorted(group.brokers) for one in _read(group.name, alias)]


def _read(group: str, alias: str) -> list[Backlog]:
    try:
        with closing(conf.make_broker(alias)) as broker:
            return [Backlog(group, alias, topic, count) for topic, count in sorted(broker.backlog(group).items())]
    except BrokerUnavailable as error:
        return [Backlog(group, alias, "", None, str(error).strip())]
