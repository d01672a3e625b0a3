"""
An operator who replays each dead letter once, and discards what comes back. `python -m tests.journeys.soak.replays`.

`soak_replayed` has what the handlers are told by it: the message can be handled now.
"""

import threading

import django

django.setup()

from django.db import connection  # noqa: E402

from outbox.consuming.acts import settle  # noqa: E402
from outbox.models import Act, Deferred  # noqa: E402
from tests.journeys.soak import consumers  # noqa: E402, F401

PAUSE = 10.0  # seconds

NOTE = "INSERT INTO soak_replayed (message_id) VALUES (%s) ON CONFLICT DO NOTHING"
NOTE_DISCARDED = "INSERT INTO soak_discarded (message_id) VALUES (%s) ON CONFLICT DO NOTHING"


def settle_dead(replayed: set[str]) -> None:
    """Replay and discard what is dead now. `replayed`: the messages that were replayed before."""
    dead = Deferred.objects.filter(dead_at__isnull=False)
    ids = set(dead.values_list("own_id", flat=True))
    back, new = ids & replayed, ids - replayed
    with connection.cursor() as cursor:
        cursor.executemany(NOTE, [[own_id] for own_id in new])
        cursor.executemany(NOTE_DISCARDED, [[own_id] for own_id in back])
    replayed |= new
    list(settle(dead.filter(own_id__in=new), Act.REPLAYED, by="the soak"))
    list(settle(dead.filter(own_id__in=back), Act.DISCARDED, by="the soak"))


if __name__ == "__main__":
    replayed: set[str] = set()
    while True:
        settle_dead(replayed)
        threading.Event().wait(PAUSE)
