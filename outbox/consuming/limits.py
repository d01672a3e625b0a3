"""
Which topics a worker may receive from: not those of which the group's database takes in too much.

A worker defers 20 failures of a topic a second on average, and does not receive the topic for a while where there are more. So
where half of a topic's messages fail, its healthy half gets about 20 a second and worker, too. And at `MOST_DEFERRED` waiting
rows a topic is not received until half of them are gone. Order, dead letters and other topics are not affected.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from outbox import conf, database
from outbox.consuming.register import Group

FAILURES_A_SECOND = 20.0
FAILURES_AT_ONCE = 200.0
COUNT_SECONDS = 10.0
MOST_GIVEN_UP = 10_000  # dead rows of a topic that the server gave up

# Messages that an operator holds, and those that are due in more than an hour, do not count.
COUNT = """
SELECT topic, count(*) FROM outbox_deferred
WHERE consumer_group = %s AND dead_at IS NULL AND (due_at IS NULL OR due_at < statement_timestamp() + interval '1 hour')
GROUP BY topic
"""

COUNT_GIVEN_UP = """
SELECT topic, count(*) FROM outbox_deferred
WHERE consumer_group = %s AND dead_at IS NOT NULL AND reason = 'server' GROUP BY topic
"""

_lock = threading.Lock()
_counted_at: dict[tuple[str, str], float] = {}  # database and group
_full: dict[tuple[str, str], dict[str, int]] = {}  # the topics at their limit -> their waiting rows


class TopicLimits:
    """The limits of one worker."""

    def __init__(self, group: Group, topics: Sequence[str]) -> None:
        self._group = group
        self._topics = topics
        self._failures: dict[str, tuple[float, float]] = {}  # topic -> how many are counted, and at what time

    def note_failure(self, topic: str) -> None:
        """Count a deferred failure of a topic."""
        self._failures[topic] = self._counted(topic) + 1, time.monotonic()

    def open_topics(self) -> list[str]:
        """Return the topics that may be received from now."""
        full = self._full_topics()
        return [topic for topic in self._topics if topic not in full and self._counted(topic) < FAILURES_AT_ONCE]

    def refusals(self) -> dict[str, str]:
        """Return why topics are not received from for a while; from any thread."""
        reasons = {
            topic: f"{rows:,} of its messages are deferred; it is received again when half of them are gone"
            for topic, rows in _full.get((self._group.using, self._group.name), {}).items()
        }
        for topic, (number, _) in list(self._failures.items()):
            if number >= FAILURES_AT_ONCE and self._counted(topic) > 0:
                reasons.setdefault(topic, f"more than {FAILURES_A_SECOND:.0f} of its messages fail in a second")
        return {topic: reason for topic, reason in reasons.items() if topic in self._topics}

    def _counted(self, topic: str) -> float:
        number, at = self._failures.get(topic, (0.0, 0.0))
        return max(0.0, number - (time.monotonic() - at) * FAILURES_A_SECOND)

    def _full_topics(self) -> dict[str, int]:
        """Return the topics at their limit, counted by one worker of the process every ten seconds."""
        place = self._group.using, self._group.name
        with _lock:
            is_due = time.monotonic() - _counted_at.get(place, float("-inf")) > COUNT_SECONDS
            if is_due:
                _counted_at[place] = time.monotonic()
        if is_due:
            most, before = conf.settings().consumer.most_deferred, _full.get(place, {})
            rows = database.raw(self._group.using).execute(COUNT, [self._group.name]).fetchall()
            _full[place] = {topic: number for topic, number in rows if number >= (most / 2 if topic in before else most)}
        return _full.get(place, {})


def topics_with_room(group: Group, topics: Sequence[str]) -> list[str]:
    """Return the topics of which more messages that the server gave up may be stored."""
    rows: dict[str, int] = dict(database.raw(group.using).execute(COUNT_GIVEN_UP, [group.name]).fetchall())
    return [topic for topic in topics if rows.get(topic, 0) < MOST_GIVEN_UP]
