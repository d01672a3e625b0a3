"""
An operator who replays each dead letter once, and discards what comes back. `python -m tests.journeys.soak.replays`.

`soak_replayed` has what the handlers are told by it: the message can be handled now.
"""

import threading

import django

django.setup()

from django.db import connection  # noqa: E402

from outbox.consuming.dead_letters import read_letters, settle_letters  # noqa: E402
from outbox.errors import BrokerUnavailable  # noqa: E402
from tests.journeys.soak import consumers  # noqa: E402, F401

PAUSE = 10.0  # seconds

NOTE = "INSERT INTO soak_replayed (message_id) VALUES (%s) ON CONFLICT DO NOTHING"
NOTE_DISCARDED = "INSERT INTO soak_discarded (message_id) VALUES (%s) ON CONFLICT DO NOTHING"


def settle(replayed: set[str]) -> None:
    """Replay and discard what is there now. `replayed`: the messages that were replayed before."""
    found = read_letters().found
    back = [one for one in found if one.letter.message_id in replayed]
    new = [one for one in found if one not in back]
    with connection.cursor() as cursor:
        cursor.executemany(NOTE, [[one.letter.message_id] for one in new])
        # After an error of the broker, nobody knows which of them were discarded, so they are noted before.
        cursor.executemany(NOTE_DISCARDED, [[one.letter.message_id] for one in back])
    replayed |= {one.letter.message_id for one in settle_letters(new, by="the soak")}
    for _ in settle_letters(back, by="the soak", discard=True):
        pass


if __name__ == "__main__":
    replayed: set[str] = set()
    while True:
        try:
            settle(replayed)
        except BrokerUnavailable as error:
            print(error, flush=True)  # noqa: T201
        threading.Event().wait(PAUSE)
