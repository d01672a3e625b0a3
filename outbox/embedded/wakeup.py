"""
Waiting for messages: a consumer that found nothing says that it wants to be told, looks once more, and waits.

It stays registered while its receives bring less than they may: a receive then costs a look, and what there is to take. A
message that becomes visible between the look and the telling is found by the poll a second later: being told is for speed,
never for safety. Behind a pooler nobody is told: there a consumer looks again soon, then less and less often.
"""

from __future__ import annotations

import time
from datetime import timedelta

from outbox.embedded import receiver
from outbox.embedded.client import Client
from outbox.embedded.receiver import Reader
from outbox.embedded.rows import ReadRow

POLL_SECONDS = 1.0
# The first wait of one who is not told, or who was outrun at what there is; each that was in vain doubles the next.
FIRST_PAUSE_SECONDS = 0.05


def take(link: Client, reader: Reader, limit: int, wait: timedelta) -> list[ReadRow]:
    """Take up to `limit` messages; when there are none, wait up to that long for the first."""
    deadline = time.monotonic() + wait.total_seconds()
    connection = link.connection()
    pause = FIRST_PAUSE_SECONDS
    while True:
        link.forget_notices()  # whatever they told of, this look sees
        seen = receiver.look(connection, reader)
        catch = receiver.take(connection, reader, seen, limit) if seen else receiver.Catch([])
        if len(catch.rows) == limit:
            link.deregister()
        left = deadline - time.monotonic()
        if catch.rows or left <= 0 or link.is_closing:
            return catch.rows
        if catch.is_moving or link.register():
            continue
        seconds = POLL_SECONDS
        if seen or not link.is_registered:
            seconds, pause = pause, min(pause * 2, POLL_SECONDS)
        link.wait(min(left, seconds, POLL_SECONDS if seen.seconds_to_next is None else seen.seconds_to_next))
