"""The broker's stored topics, which are created from settings when they are first used."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import inf

import msgspec

from outbox.brokers.base import ServerResource
from outbox.brokers.validation import known_topic
from outbox.database import Connection
from outbox.findings import Finding, misconfigured, weak
from outbox.ids import topic_number
from outbox.message import TopicSpec, TopicType

# If two processes create a topic at once, the second finds the row of the first. An existing row is never changed.
CREATE_TOPICS = """
INSERT INTO outbox_embedded_topic (id, name, type, queues)
SELECT * FROM unnest(%s::int[], %s::text[], %s::text[], %s::int[]) ON CONFLICT DO NOTHING
"""

READ_TOPICS = "SELECT id, name, type, queues FROM outbox_embedded_topic WHERE name = ANY(%s)"


class StoredTopic(msgspec.Struct, frozen=True):
    """The row of a topic."""

    id: int
    name: str
    type: TopicType
    queues: int

    def queue_of(self, key: str) -> int:
        """Return the queue of a key, which is always the same."""
        return zlib.crc32(key.encode()) % self.queues


READ_SECONDS = 5.0  # the interval at which the rows are read again


class Topics:
    """The stored topics of one broker, read again after READ_SECONDS, since a test or an operator may empty all tables."""

    def __init__(self, specs: Mapping[str, TopicSpec]) -> None:
        self._specs = specs
        self._stored: dict[str, StoredTopic] = {}
        self.read_at = -inf

    def stored(self, connection: Connection, name: str) -> StoredTopic:
        """
        Return the row of a topic. When rows are read, all missing topics of the broker are created.

        Raises:
            UnknownTopic: settings do not assign this topic to the broker.
        """
        known_topic(self._specs, name)
        if name not in self._stored or time.monotonic() - self.read_at > READ_SECONDS:
            self._stored = write_topics(connection, self._specs.values())
            self.read_at = time.monotonic()
        return self._stored[name]

    def difference(self, stored: StoredTopic) -> str:
        """Return how a topic's type in settings differs from its row; "" if it does not."""
        return _difference(self._specs[stored.name], stored)


def _difference(spec: TopicSpec, stored: StoredTopic) -> str:
    if spec.type is stored.type:
        return ""
    return f"Topic {spec.name!r} is of type {spec.type} in settings and of type {stored.type} in the broker."


def write_topics(connection: Connection, specs: Iterable[TopicSpec]) -> dict[str, StoredTopic]:
    """Create the topics that are missing. Return all of them by name."""
    specs = list(specs)
    names = [spec.name for spec in specs]
    ids = [topic_number(name) for name in names]
    connection.execute(CREATE_TOPICS, [ids, names, [str(spec.type) for spec in specs], [spec.queues for spec in specs]])
    return _read_topics(connection, names)


def _read_topics(connection: Connection, names: Iterable[str]) -> dict[str, StoredTopic]:
    rows = connection.execute(READ_TOPICS, [list(names)])
    return {name: StoredTopic(id_, name, TopicType(kind), queues) for id_, name, kind, queues in rows}


def differences(connection: Connection, specs: Mapping[str, TopicSpec]) -> list[Finding]:
    """Return the differences between topics in settings and in the tables, after creating missing ones."""
    problems = []
    for stored in write_topics(connection, specs.values()).values():
        spec = specs[stored.name]
        if difference := _difference(spec, stored):
            problems.append(
                misconfigured(difference, "The type of a topic cannot change. Give the new topic another name, or correct TYPE.")
            )
        if spec.queues != stored.queues:
            problems.append(
                weak(
                    f"Topic {spec.name!r} has {spec.queues} queues in settings and {stored.queues} in the broker.",
                    "The number of queues of a topic cannot change, because keys would move between queues. Correct QUEUES.",
                )
            )
    return problems


def resources(
    connection: Connection, specs: Mapping[str, TopicSpec], create: Callable[[TopicSpec], None]
) -> Iterable[ServerResource]:
    """Yield the topics in settings, compared with those in the tables."""
    existing = _read_topics(connection, specs)
    for spec in specs.values():
        stored = existing.get(spec.name)
        yield ServerResource(
            "topic",
            spec.name,
            {"type": str(spec.type), "queues": str(spec.queues)},
            partial(create, spec),
            exists=stored is not None,
            differences=tuple(_differences(spec, stored)) if stored else (),
        )


def _differences(spec: TopicSpec, stored: StoredTopic) -> Iterable[str]:
    if stored.type is not spec.type:
        yield f"type {stored.type}, not {spec.type}"
    if stored.queues != spec.queues:
        yield f"{stored.queues} queues, not {spec.queues}"
