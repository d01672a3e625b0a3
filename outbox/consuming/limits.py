"""
Limits of how much a group defers: they say from which topics a worker may receive at the moment.

If more than 20 messages of a topic fail in a second on average, the worker does not receive from the topic for a while. So if
every second message of a topic fails, a worker handles about 20 others per second. If `MAX_DEFERRED` messages of a topic are
deferred, no worker of the group receives from the topic until half of them have ended. Neither limit affects order, dead letters,
or other topics.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from outbox import conf, database
from outbox.consuming.register import Group

FAILURES_PER_SECOND = 20.0  # the allowed average
FAILURES_AT_ONCE = 200.0  # this many failures above the average are allowed before the topic is no longer received
COUNT_SECONDS = 10.0  # interval of counting deferred messages
MAX_DEAD_LETTERS = 10_000  # maximum number of a topic's dead letters that come from the server's dead-letter queue

# Count deferred messages, except those that an operator holds, and those that are due in more than an hour.
COUNT = """
SELECT topic, count(*) FROM outbox_deferred
WHERE consumer_group = %s AND dead_at IS NULL AND (due_at IS NULL OR due_at < statement_timestamp() + interval '1 hour')
GROUP BY topic
"""

# Count the dead letters that come from the server's dead-letter queue.
COUNT_DEAD_LETTERS = """
SELECT topic, count(*) FROM outbox_deferred
WHERE consumer_group = %s AND dead_at IS NOT NULL AND reason = 'server' GROUP BY topic
"""

_lock = threading.Lock()
_counted_at: dict[tuple[str, str], float] = {}  # (database, group) -> when its deferred messages were counted
_full: dict[tuple[str, str], set[str]] = {}  # (database, group) -> topics that are not received


class TopicLimits:
    """Decides from which topics a worker may receive, by the failures of this worker and the deferred messages of its group."""

    def __init__(self, group: Group, topics: Sequence[str]) -> None:
        self._group = group
        self._topics = topics
        self._failures: dict[str, tuple[float, float]] = {}  # topic -> failures above the average at the last one, and its time

    def count_failure(self, topic: str) -> None:
        """Count a message of a topic whose handling failed."""
        self._failures[topic] = self._excess_failures(topic) + 1, time.monotonic()

    def open_topics(self) -> list[str]:
        """Return the topics from which the worker may receive now."""
        full = self._full_topics()
        return [topic for topic in self._topics if topic not in full and self._excess_failures(topic) < FAILURES_AT_ONCE]

    def _excess_failures(self, topic: str) -> float:
        number, counted_at = self._failures.get(topic, (0.0, 0.0))
        return max(0.0, number - (time.monotonic() - counted_at) * FAILURES_PER_SECOND)

    def _full_topics(self) -> set[str]:
        """Return the topics that have reached MAX_DEFERRED. One of the process's workers counts, at most every COUNT_SECONDS."""
        key = self._group.using, self._group.name
        with _lock:
            is_due = time.monotonic() - _counted_at.get(key, float("-inf")) > COUNT_SECONDS
            if is_due:
                _counted_at[key] = time.monotonic()
        if is_due:
            limit, before = conf.settings().consumer.max_deferred, _full.get(key, set())
            rows = database.raw(self._group.using).execute(COUNT, [self._group.name]).fetchall()
            _full[key] = {topic for topic, number in rows if number >= (limit / 2 if topic in before else limit)}
        return _full.get(key, set())


def topics_with_room(group: Group, topics: Sequence[str]) -> list[str]:
    """Return the topics of which more messages from the server's dead-letter queue may be stored as dead letters."""
    rows: dict[str, int] = dict(database.raw(group.using).execute(COUNT_DEAD_LETTERS, [group.name]).fetchall())
    return [topic for topic in topics if rows.get(topic, 0) < MAX_DEAD_LETTERS]
