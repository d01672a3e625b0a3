"""
An operator who replays each dead letter once, and discards what comes back. `python -m tests.journeys.soak.replays`.

`soak_replayed` has what the handlers are told by it: the message can be handled now.
"""

import threading

import django

django.setup()

from django.db import connection  # noqa: E402

from outbox.consuming.dead_letters import Letter, read_letters, settle_letters  # noqa: E402
from tests.journeys.soak import consumers  # noqa: E402, F401

PAUSE = 10.0  # seconds

NOTE = "INSERT INTO soak_replayed (message_id) VALUES (%s) ON CONFLICT DO NOTHING RETURNING 1"
NOTE_DISCARDED = "INSERT INTO soak_discarded (message_id) VALUES (%s) ON CONFLICT DO NOTHING"


def settle() -> None:
    """Replay and discard what is there now."""
    found = read_letters().found
    new = [one for one in found if _is_new(one)]
    for _ in settle_letters(new, by="the soak"):
        pass
    for one in settle_letters([one for one in found if one not in new], by="the soak", discard=True):
        with connection.cursor() as cursor:
            cursor.execute(NOTE_DISCARDED, [one.letter.message_id])


def _is_new(one: Letter) -> bool:
    with connection.cursor() as cursor:
        cursor.execute(NOTE, [one.letter.message_id])
        return cursor.fetchone() is not None


if __name__ == "__main__":
    while True:
        settle()
        threading.Event().wait(PAUSE)
