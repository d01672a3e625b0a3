"""
Limits of what a group stores: the topics from which a worker may receive at the moment.

If more than 20 messages of a topic fail in a second on average, the worker does not receive from the topic for a while. So if
half of a topic's messages fail, each worker handles about 20 of the others per second. And when `MAX_DEFERRED` messages of a
topic are deferred, the topic is not received until half of them are gone. Neither limit affects order, dead letters, or other
topics.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from outbox import conf, database
from outbox.consuming.register import Group

FAILURES_PER_SECOND = 20.0  # average
FAILURES_AT_ONCE = 200.0  # beyond the average
COUNT_SECONDS = 10.0  # interval of counting deferred messages
MAX_DEAD_LETTERS = 10_000  # dead letters of a topic that the server gave up

# Messages that an operator holds, and messages that are due in more than an hour, do not count.
COUNT = """
SELECT topic, count(*) FROM outbox_deferred
WHERE consumer_group = %s AND dead_at IS NULL AND (due_at IS NULL OR due_at < statement_timestamp() + interval '1 hour')
GROUP BY topic
"""

COUNT_DEAD_LETTERS = """
SELECT topic, count(*) FROM outbox_deferred
WHERE consumer_group = %s AND dead_at IS NOT NULL AND reason = 'server' GROUP BY topic
"""

_lock = threading.Lock()
_counted_at: dict[tuple[str, str], float] = {}  # database and group
_full: dict[tuple[str, str], dict[str, int]] = {}  # topics at their limit -> number of their deferred messages


class TopicLimits:
    """The limits of one worker."""

    def __init__(self, group: Group, topics: Sequence[str]) -> None:
        self._group = group
        self._topics = topics
        self._failures: dict[str, tuple[float, float]] = {}  # topic -> failures beyond the average at a time, and that time

    def count_failure(self, topic: str) -> None:
        """Count a deferred failure of a topic."""
        self._failures[topic] = self._excess_failures(topic) + 1, time.monotonic()

    def open_topics(self) -> list[str]:
        """Return the topics from which the worker may receive now."""
        full = self._full_topics()
        return [topic for topic in self._topics if topic not in full and self._excess_failures(topic) < FAILURES_AT_ONCE]

    def refusals(self) -> dict[str, str]:
        """Return the topics that are not received for a while -> why; may be called from any thread."""
        reasons = {
            topic: f"{rows:,} of its messages are deferred; it is received again when half of them are gone"
            for topic, rows in _full.get((self._group.using, self._group.name), {}).items()
        }
        for topic, (number, _) in list(self._failures.items()):
            if number >= FAILURES_AT_ONCE and self._excess_failures(topic) > 0:
                reasons.setdefault(topic, f"more than {FAILURES_PER_SECOND:.0f} of its messages fail in a second")
        return {topic: reason for topic, reason in reasons.items() if topic in self._topics}

    def _excess_failures(self, topic: str) -> float:
        number, counted_at = self._failures.get(topic, (0.0, 0.0))
        return max(0.0, number - (time.monotonic() - counted_at) * FAILURES_PER_SECOND)

    def _full_topics(self) -> dict[str, int]:
        """Return the topics at their limit. One worker of the process counts the rows, at most every COUNT_SECONDS."""
        key = self._group.using, self._group.name
        with _lock:
            is_due = time.monotonic() - _counted_at.get(key, float("-inf")) > COUNT_SECONDS
            if is_due:
                _counted_at[key] = time.monotonic()
        if is_due:
            limit, before = conf.settings().consumer.max_deferred, _full.get(key, {})
            rows = database.raw(self._group.using).execute(COUNT, [self._group.name]).fetchall()
            _full[key] = {topic: number for topic, number in rows if number >= (limit / 2 if topic in before else limit)}
        return _full.get(key, {})


def topics_with_room(group: Group, topics: Sequence[str]) -> list[str]:
    """Return the topics of which more messages that the server gave up may be stored as dead letters."""
    rows: dict[str, int] = dict(database.raw(group.using).execute(COUNT_DEAD_LETTERS, [group.name]).fetchall())
    return [topic for topic in topics if rows.get(topic, 0) < MAX_DEAD_LETTERS]
