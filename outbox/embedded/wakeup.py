"""
Waiting for messages: a consumer that found nothing says that it wants to be told, looks once more, and waits.

It stays registered while its receives bring less than they may: then it reads the queues that it is told of, and looks at all
there may be only once in a while. A message that becomes visible between the look and the telling is found by the poll a second
later: being told is for speed, never for safety. Behind a pooler nobody is told: there a consumer looks again soon, then less and
less often.
"""

from __future__ import annotations

import time
from datetime import timedelta

from outbox.embedded import receiver
from outbox.embedded.client import Client, Lull
from outbox.embedded.receiver import Catch, Look, Reader
from outbox.embedded.rows import ReadRow

POLL_SECONDS = 1.0
# The first wait of a consumer that is not notified, or found its messages taken; each that finds nothing doubles the next.
FIRST_PAUSE_SECONDS = 0.05


def take(link: Client, reader: Reader, limit: int, wait: timedelta) -> list[ReadRow]:
    """Take up to `limit` messages; when there are none, wait up to that long for the first."""
    deadline = time.monotonic() + wait.total_seconds()
    connection = link.connection()
    pause = FIRST_PAUSE_SECONDS
    told: set[str] = set()
    while True:
        told |= link.notices()  # whatever else they told of, a look sees
        seen = _read_notices(link.lull, reader, told) if wait else None
        if seen is None:
            seen = receiver.look(connection, reader)
            link.lull = _lull(link, reader, seen)
        catch = receiver.take(connection, reader, seen, limit) if seen else Catch([])
        if len(catch.rows) == limit:
            link.deregister()
        if seen and not catch.rows:
            link.lull = None  # another consumer took them, or there is more to be done
        left = deadline - time.monotonic()
        if catch.rows or left <= 0 or link.is_closing:
            return catch.rows
        told = set()
        if catch.is_moving or link.register():
            continue
        seconds = POLL_SECONDS
        if seen or not link.is_registered:
            seconds, pause = pause, min(pause * 2, POLL_SECONDS)
        told = link.wait(min(left, seconds, POLL_SECONDS if seen.seconds_to_next is None else seen.seconds_to_next))


def _lull(link: Client, reader: Reader, seen: Look) -> Lull | None:
    """Return how long nothing but what is told of can follow a look, if what it saw is taken."""
    if not link.is_registered or reader.now() is not None:  # of a clock that is not the server's, nobody knows how it goes on
        return None
    seconds = POLL_SECONDS if seen.seconds_to_next is None else min(POLL_SECONDS, seen.seconds_to_next)
    return Lull(reader.reads, time.monotonic() + seconds)


def _read_notices(lull: Lull | None, reader: Reader, told: set[str]) -> Look | None:
    """Return what a group is told of, while there can be nothing else. None: somebody must look."""
    left = 0.0 if lull is None or lull.reads != reader.reads else lull.until - time.monotonic()
    if left <= 0 or "" in told:
        return None
    queues = [(int(topic_id), int(queue)) for topic_id, _, queue in (one.partition(":") for one in told)]
    _, topic_ids = reader.reads
    return Look(False, False, [(topic_id, queue) for topic_id, queue in queues if topic_id in topic_ids], left)
