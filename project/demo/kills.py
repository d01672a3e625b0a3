"""
Plan which process is killed at which failpoint.

A file permits one kill. The process that reaches its failpoint appends its process id to the file's name, and kills itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from outbox.failpoints import VARIABLE

HALF_SENT = "relay.after_half"  # half messages stored, nothing decided: check-backs answer ROLLBACK
DECIDED = "relay.after_decide"  # decided, not committed: check-backs answer COMMIT
CLAIMED = "relay.after_claim"  # nothing sent
CONFIRMED = "relay.after_send"  # one phase: the broker has the messages, but the database does not know, so they are sent again
COMMITTED = "relay.after_transaction"  # one phase, in a transaction of the broker, whose marker tells the next relay
WRITTEN = "consumer.after_handler"  # inside the handler's transaction, which is rolled back
UNACKED = "consumer.after_commit"  # the handler's writes are committed, but the broker does not know, so it delivers again

LONG_RUNNING, CELERY = "relay", "celery"  # the names of the two processes with relays
RELAY_PLACES = (HALF_SENT, DECIDED, CLAIMED, CONFIRMED, COMMITTED)
PLACES = {LONG_RUNNING: RELAY_PLACES, CELERY: RELAY_PLACES}
CONSUMER_PLACES = (WRITTEN, UNACKED)

IN_WORDS = {
    LONG_RUNNING: "the long-running relay",
    CELERY: "Celery's relay",
    HALF_SENT: "after its half messages, before it decided",
    DECIDED: "after it decided, before it committed",
    CLAIMED: "after it claimed messages, before it sent them",
    CONFIRMED: "after the broker's confirms, before it marked the messages as sent",
    COMMITTED: "after its transaction was committed, before it marked the messages as sent",
    WRITTEN: "inside its handler's transaction",
    UNACKED: "after its handler's commit, before the ack",
}


@dataclass(frozen=True, slots=True)
class Kill:
    """A planned kill of a process at a failpoint."""

    process: str
    place: str

    def __str__(self) -> str:
        return f"{IN_WORDS.get(self.process, f'the consumer {self.process}')} {IN_WORDS[self.place]}"

    @property
    def is_of_relay(self) -> bool:
        return self.process in PLACES


@dataclass(frozen=True, slots=True)
class Round:
    """
    The kills of one round: the long-running relay, then Celery's relay while the first is dead; consumers at the same time.

    Args:
        kills_broker: whether the broker is killed before the relays, while the consumers are dead and it has messages for them.
    """

    long_running: Kill
    celery: Kill
    consumers: tuple[Kill, ...]
    kills_broker: bool = False


# The kills after a decision come first, since the half messages that remain are committed by a later sweep of the relays.
ROUNDS = (
    Round(Kill(LONG_RUNNING, DECIDED), Kill(CELERY, DECIDED), (Kill("cart", UNACKED), Kill("points", UNACKED))),
    Round(Kill(LONG_RUNNING, DECIDED), Kill(CELERY, DECIDED), (Kill("shipment", UNACKED), Kill("letters", WRITTEN))),
    Round(Kill(LONG_RUNNING, HALF_SENT), Kill(CELERY, HALF_SENT), (Kill("points", UNACKED), Kill("shipment", WRITTEN))),
    Round(Kill(LONG_RUNNING, HALF_SENT), Kill(CELERY, HALF_SENT), (Kill("cart", UNACKED), Kill("letters", UNACKED))),
)


def one_phase_rounds(sent: str) -> tuple[Round, ...]:
    """
    Return the rounds for a broker without half messages, in one of which the broker is killed, too.

    Args:
        sent: the failpoint at which the broker has the messages and the database does not know.
    """
    return (
        Round(Kill(LONG_RUNNING, sent), Kill(CELERY, sent), (Kill("cart", UNACKED), Kill("letters", WRITTEN))),
        Round(
            Kill(LONG_RUNNING, CLAIMED),
            Kill(CELERY, sent),
            (Kill("points", UNACKED), Kill("shipment", UNACKED)),
            kills_broker=True,
        ),
        Round(Kill(LONG_RUNNING, sent), Kill(CELERY, CLAIMED), (Kill("points", UNACKED), Kill("shipment", WRITTEN))),
        Round(Kill(LONG_RUNNING, CLAIMED), Kill(CELERY, CLAIMED), (Kill("cart", UNACKED), Kill("letters", UNACKED))),
    )


class Permits:
    """The permissions for kills, which are files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def environment(self, process: str) -> dict[str, str]:
        """Return the environment variable with which a process kills itself at its failpoints, once that is permitted."""
        places = PLACES.get(process, CONSUMER_PLACES)
        return {VARIABLE: ",".join(f"{place}=kill:{self.path(Kill(process, place))}" for place in places)}

    def grant(self, kill: Kill) -> None:
        self.path(kill).touch()

    def revoke(self, kill: Kill) -> bool:
        """Withdraw a permission; return False if it was already used."""
        try:
            self.path(kill).unlink()
        except FileNotFoundError:
            return False
        return True

    def is_used(self, kill: Kill) -> bool:
        return not self.path(kill).exists()

    def done(self) -> Iterator[tuple[Kill, int]]:
        """Yield each kill that happened, with the id of the process."""
        for trace in sorted(self.folder.glob("*.*.*")):
            process, _, rest = trace.name.partition(".")
            place, _, pid = rest.rpartition(".")
            if pid.isdecimal() and not _is_alive(int(pid)):
                yield Kill(process, place), int(pid)

    def path(self, kill: Kill) -> Path:
        """Return the file that permits a kill."""
        return self.folder / f"{kill.process}.{kill.place}"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
