"""
What a broker may offer besides the contract: a small class for each, which the broker adds to its bases.

A flag of `Broker` says whether a broker, or its class, offers something. Ask the flag first; `HalfMessages.of(broker)` then
is the broker as one that offers half messages.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast, overload

from outbox.brokers.base import Broker
from outbox.brokers.types import BrokerStatus, DeadLetter, EndSemantics, HalfRef, HalfStanding, Outgoing, SendResult, StoredCopy
from outbox.errors import UnsupportedByBroker
from outbox.message import Half, Resolution

if TYPE_CHECKING:  # a broker that is on a server needs no database
    from outbox.database import Connection


class Capability(Broker):
    """Something that only some brokers offer; `flag` is the name of the flag that says whether one does."""

    flag: ClassVar[str]

    @overload
    @classmethod
    def of(cls, broker: type[Broker]) -> type[Self]: ...

    @overload
    @classmethod
    def of(cls, broker: Broker) -> Self: ...

    @classmethod
    def of(cls, broker: Broker | type[Broker]) -> Self | type[Self]:
        """
        Return a broker, or a class of brokers, as one that offers this.

        Raises:
            UnsupportedByBroker: it does not. The flag would have said so.
        """
        kind = broker if isinstance(broker, type) else type(broker)
        if not (issubclass(kind, cls) and getattr(broker, cls.flag)):
            raise UnsupportedByBroker(f"{kind.__name__} offers no {cls.__name__}. Ask {cls.flag} first.")
        return cast("Self | type[Self]", broker)


class Lookups(Capability):
    """Messages can be looked up by their id."""

    flag = "supports_lookups"
    supports_lookups: ClassVar[bool] = True

    @abc.abstractmethod
    def find(self, message_id: str, *, half: HalfRef | None = None) -> list[StoredCopy]:
        """
        Return a message in each form in which the broker holds it. A server may find one only a moment after it took it.

        Args:
            half: the half message it was, where the caller knows it: its place may lead to what the id alone does not.
        """


class HalfMessages(Lookups):
    """
    Half messages: stored hidden, and shown to consumers by a COMMIT.

    Half messages that nobody ends must be asked about: by `NeedsCheckLoop`, by `AsksProducers`, or by the server over HTTP.
    """

    flag = "supports_half_messages"
    supports_half_messages: ClassVar[bool] = True
    end_semantics: EndSemantics = EndSemantics.STATELESS

    # Where ends are not idempotent: whoever has decided a batch may end its half messages for that long, and check-backs
    # about them are UNKNOWN meanwhile. Later, take the batch over first (`batches/take_over.py`). None: end at any time.
    commit_window: timedelta | None = None
    # Whether calls of `new_half_id`, `send_halves` and `end` may come from several threads at once. A process then keeps one
    # broker for all its threads that publish half first, else one for each.
    is_thread_safe: ClassVar[bool] = False
    # Beyond this age the broker asks no more about a half message: it was ended, or it is lost.
    check_horizon: timedelta = timedelta(minutes=10)

    @property
    @abc.abstractmethod
    def confirms_ends(self) -> bool:
        """
        Whether an accepted end has surely taken effect.

        True: a message whose COMMIT was ACCEPTED is stored as firmly as one that was sent one-phase. False: the answer says
        only that the request was passed on, so the message itself must be looked up. It may depend on the options.
        """

    @property
    def end_window(self) -> timedelta | None:
        """How long after its decision, or since it was taken over, a half message may be ended. None: at any time."""
        return None if self.end_semantics is EndSemantics.IDEMPOTENT else self.commit_window

    @classmethod
    def max_check_back_age(cls, options: Mapping[str, Any]) -> timedelta:
        """Return up to which age a half message may be asked about. What its answer stands on must live longer."""
        return cls.check_horizon

    @abc.abstractmethod
    def new_half_id(self, message_id: str) -> str:
        """Return an id for a half message that is yet to be sent, for `Outgoing.half_id`. Each call returns another."""

    @abc.abstractmethod
    def send_halves(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        """
        Store half messages. Each is sent once and never repeated.

        `SendResult.half_id` names the half message; `SendResult.place` says where it is stored, where the broker can use
        that to find it again. Callers hand back both in a `HalfRef`.
        """

    @abc.abstractmethod
    def end(self, halves: Sequence[HalfRef], resolution: Resolution, *, within: timedelta | None = None) -> list[SendResult]:
        """
        Commit or roll back half messages; `SendResult.ended` says how each stands now.

        Args:
            within: no end leaves later than that from now; what has not left by then is UNAVAILABLE. None: no limit.
        """

    @abc.abstractmethod
    def look_up_halves(self, halves: Sequence[HalfRef]) -> list[HalfStanding]:
        """
        Return where half messages stand that were decided to be committed, so that nobody ends one twice or resends in vain.

        Only what is surely so is VISIBLE, HIDDEN or GONE. Trouble at the broker is UNKNOWN, never an exception.
        """


class NeedsCheckLoop(HalfMessages):
    """The broker asks about half messages when a host of ours calls `check_halves`, which it does now and then."""

    flag = "needs_check_loop"
    needs_check_loop: ClassVar[bool] = True

    @abc.abstractmethod
    def check_halves(self, ask: Callable[[Half], Resolution], *, limit: int = 100) -> int:
        """Ask about half messages that are due and end them as answered. Return how many were asked about."""


class AsksProducers(HalfMessages):
    """The server asks the processes that listen."""

    flag = "asks_producers"
    asks_producers: ClassVar[bool] = True

    @abc.abstractmethod
    def listen(self, ask: Callable[[Half], Resolution], *, note_sent: Callable[[Half, Resolution], None] | None = None) -> None:
        """
        Call `ask`, in threads of the broker's own, whenever the server asks about a half message, until `close`.

        Args:
            note_sent: called where the server was sent another answer than `ask` gave. A message that is visible already
                must not be committed once more, for example: ROLLBACK then only ends the asking.
        """


class DeadLetters(Capability):
    """Dead letters can be listed, delivered again and discarded."""

    flag = "supports_replay"
    supports_replay: ClassVar[bool] = True

    @abc.abstractmethod
    def dead_letters(self, group: str, *, limit: int = 100) -> list[DeadLetter]:
        """Return what a group gave up, oldest first."""

    @abc.abstractmethod
    def replay(self, group: str, letters: Sequence[str]) -> int:
        """Deliver dead letters (by `DeadLetter.id`) to their group again, attempts from 1. Return how many."""

    @abc.abstractmethod
    def discard(self, group: str, letters: Sequence[str]) -> int:
        """Drop dead letters (by `DeadLetter.id`) for good. Return how many were still there."""

    def deliver_again(self, group: str, message_ids: Sequence[str]) -> set[str]:
        """
        Deliver messages that a group has finished to it again, attempts from 1. Return the ids of those that will be.

        Only where `deduplicates_sends` is true: elsewhere the message is sent again.
        """
        raise UnsupportedByBroker(f"{type(self).__name__} delivers what is sent again. Ask deduplicates_sends first.")


class TransactionalSends(Capability):
    """
    One-phase messages that become visible together, and with them a marker that says which they were.

    A relay's lane has a series of transactions, and one broker at a time holds it. Who opens a lane ends what its last holder
    left, and shuts that holder out; the marker, never an answer, then says whether the last transaction was committed. Each
    transaction overwrites the lane's marker, so note what the marker says before sending the next.
    """

    flag = "supports_transactional_sends"
    supports_transactional_sends: ClassVar[bool] = True

    @abc.abstractmethod
    def open_lane(self, lane: int) -> str | None:
        """
        Take a lane over. Return the marker of the last transaction that was committed on it; None: there never was one.

        When this returns, no transaction of an earlier holder is undecided, and none can be committed any more.
        """

    @abc.abstractmethod
    def send_transaction(self, lane: int, messages: Sequence[Outgoing], marker: str) -> list[SendResult]:
        """
        Send messages and a marker in one transaction of a lane: all of them become visible, or none does.

        Either all results are ACCEPTED, and the transaction is committed; or all are UNSURE, and only the marker says; or
        none is ACCEPTED or UNSURE, and nothing is stored: those at fault are REFUSED or MISCONFIGURED, their fellows
        UNAVAILABLE. A lane that this broker has not opened, or has lost to another, is UNAVAILABLE or UNSURE. After UNSURE
        and UNAVAILABLE, open the lane again.
        """


class StoredInDatabase(Capability):
    """The broker keeps its messages in tables, where they can be read without asking it."""

    flag = "is_stored_in_database"
    is_stored_in_database: ClassVar[bool] = True

    @classmethod
    @abc.abstractmethod
    def stored_in(cls, options: Mapping[str, Any]) -> str:
        """Return the alias of the database that has the tables."""

    @classmethod
    @abc.abstractmethod
    def read_status(cls, options: Mapping[str, Any], database: str, connection: Connection) -> BrokerStatus:
        """Return what an operator should know of what the broker keeps in a database, over a connection to that."""

    @classmethod
    @abc.abstractmethod
    def read_copies(cls, options: Mapping[str, Any], message_id: str, half_ids: Sequence[str]) -> list[StoredCopy]:
        """Return what the broker keeps of a message and of its half messages, over Django's connection to its database."""
