"""Topics as the broker's tables know them: created at first use, from what settings say."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from outbox.brokers.base import Problem
from outbox.brokers.validation import known_topic
from outbox.database import Connection
from outbox.message import TopicSpec, TopicType

# Two processes that create a topic at once: the second finds the first's row. What is there is never changed.
CREATE_TOPICS = """
INSERT INTO outbox_embedded_topic (name, type, queues)
SELECT * FROM unnest(%s::text[], %s::text[], %s::int[]) ON CONFLICT (name) DO NOTHING
"""

READ_TOPICS = "SELECT id, name, type, queues FROM outbox_embedded_topic WHERE name = ANY(%s)"


@dataclass(frozen=True, slots=True)
class StoredTopic:
    """A topic's row."""

    id: int
    name: str
    type: TopicType
    queues: int

    def queue_of(self, key: str) -> int:
        """Return the queue a key always goes to."""
        return zlib.crc32(key.encode()) % self.queues

    def any_queue(self) -> int:
        """Return a queue for messages without a key."""
        return random.randrange(self.queues)  # noqa: S311  (it spreads, it guards nothing)


class Topics:
    """The topics of one broker, read once."""

    def __init__(self, specs: Mapping[str, TopicSpec]) -> None:
        self._specs = specs
        self._stored: dict[str, StoredTopic] = {}

    def stored(self, connection: Connection, name: str) -> StoredTopic:
        """
        Return a topic's row; the first call creates what is missing of all the broker's topics.

        Raises:
            UnknownTopic: settings do not give this topic to the broker.
        """
        if name not in self._stored:
            known_topic(self._specs, name)
            self._stored = write_topics(connection, self._specs.values())
        return self._stored[name]

    def difference(self, stored: StoredTopic) -> str:
        """Return in which type settings and the topic's row differ; empty: in none."""
        return _difference(self._specs[stored.name], stored)


def _difference(spec: TopicSpec, stored: StoredTopic) -> str:
    if spec.type is stored.type:
        return ""
    return f"Topic {spec.name!r} is of type {spec.type} in settings and of type {stored.type} in the broker."


def write_topics(connection: Connection, specs: Iterable[TopicSpec]) -> dict[str, StoredTopic]:
    """Create the topics that are missing and give all, by name."""
    specs = list(specs)
    names = [spec.name for spec in specs]
    connection.execute(CREATE_TOPICS, [names, [str(spec.type) for spec in specs], [spec.queues for spec in specs]])
    rows = connection.execute(READ_TOPICS, [names])
    return {name: StoredTopic(id_, name, TopicType(kind), queues) for id_, name, kind, queues in rows}


def differences(connection: Connection, specs: Mapping[str, TopicSpec]) -> list[Problem]:
    """Return where settings and the topics in the tables differ."""
    found = []
    for stored in write_topics(connection, specs.values()).values():
        spec = specs[stored.name]
        if wrong := _difference(spec, stored):
            found.append(Problem(wrong, "A topic keeps its type. Give the new one another name, or correct TYPE."))
        if spec.queues != stored.queues:
            found.append(
                Problem(
                    f"Topic {spec.name!r} has {spec.queues} queues in settings and {stored.queues} in the broker.",
                    "A topic keeps its number of queues, so that each key stays in its queue. Correct QUEUES.",
                    is_error=False,
                )
            )
    return found
