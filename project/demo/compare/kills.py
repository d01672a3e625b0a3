"""Plan the kills of a comparison: the same for all three ways, and in addition the outbox's relay."""

from __future__ import annotations

from collections.abc import Mapping

from outbox.failpoints import VARIABLE
from project.demo.kills import CONSUMER_PLACES, LONG_RUNNING, UNACKED, WRITTEN, Kill, Permits

SENT = "shop.sent"  # inside the order's transaction, after its messages were sent or written
COMMITTED = "shop.committed"  # after the order's commit, before on_commit callbacks send messages
CONFIRMED = "relay.after_send"  # RabbitMQ has the messages, but the relay has not recorded that, so they are sent again

WEB, WORKER = "web", "worker"

IN_WORDS = {
    SENT: "the web process right before an order's commit",
    COMMITTED: "the web process right after an order's commit",
    CONFIRMED: "the relay after RabbitMQ's confirms, before it recorded them",
}

RELAY = Kill(LONG_RUNNING, CONFIRMED)

ROUNDS: tuple[tuple[Kill, ...], ...] = (
    (Kill(WEB, COMMITTED), Kill("cart", UNACKED)),
    (Kill(WEB, SENT), Kill("points", UNACKED), RELAY),
    (Kill(WEB, COMMITTED), Kill("shipment", WRITTEN), Kill("letters", UNACKED)),
    (Kill(WEB, SENT), Kill("shipment", UNACKED), RELAY),
)
OUTAGE_AFTER = 2  # the round after which RabbitMQ is killed


def in_words(kill: Kill) -> str:
    return IN_WORDS.get(kill.place) or str(kill)


def environment(process: str, permits: Permits) -> dict[str, str]:
    """Return the environment variable with which a process kills itself at its failpoints, once that is permitted."""
    return {VARIABLE: ",".join(f"{place}=kill:{permits.path(kill)}" for place, kill in _failpoints(process).items())}


def _failpoints(process: str) -> Mapping[str, Kill]:
    """Return the failpoints of a process. Celery's worker has those of all groups, whose names they include."""
    planned = {kill for kills in ROUNDS for kill in kills}
    if process == WORKER:
        return {f"{kill.place}.{kill.process}": kill for kill in planned if kill.place in CONSUMER_PLACES}
    return {kill.place: kill for kill in planned if kill.process == process}
