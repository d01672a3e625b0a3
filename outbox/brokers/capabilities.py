"""
Features that only some brokers have: a small class for each, which a broker adds to its bases.

`HalfMessages.has(broker)` returns whether a broker, or its class, has half messages; then `HalfMessages.of(broker)` returns the
broker, typed as one that has. A class is narrowed by `issubclass`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

from outbox.brokers.base import Broker
from outbox.brokers.types import (
    Backlog,
    Delivery,
    EndSemantics,
    GroupPosition,
    HalfRef,
    HalfStatus,
    Outgoing,
    SendResult,
    ServerResource,
    StoredCopy,
    StoredList,
)
from outbox.errors import UnsupportedByBroker
from outbox.message import Half, Resolution, TopicSpec

if TYPE_CHECKING:  # brokers on a server need no database
    from outbox.database import Connection


class Capability(Broker):
    """Base of features that only some brokers have."""

    @classmethod
    def has(cls, broker: Broker | type[Broker]) -> bool:
        """Return whether a broker, or a broker class, has this feature."""
        kind = broker if isinstance(broker, type) else type(broker)
        return issubclass(kind, cls) and not issubclass(cls, tuple(broker.lacks))

    @classmethod
    def of(cls, broker: Broker) -> Self:
        """
        Return a broker, typed as one with this feature.

        Raises:
            UnsupportedByBroker: it does not have the feature.
        """
        if not cls.has(broker):
            name = type(broker).__name__
            raise UnsupportedByBroker(f"{name} has no {cls.__name__}.", hint=f"Check {cls.__name__}.has(broker) first.")
        return cast("Self", broker)


class Receives(Capability):
    """Consumer groups receive the messages, each group all of them."""

    # Topics that `receive` was asked for and cannot receive from as configured, each with the reason. Any thread may read it.
    refusals: Mapping[str, str] = {}

    @abc.abstractmethod
    def receive(
        self, group: str, topics: Collection[str], *, limit: int, invisible_for: timedelta, wait: timedelta
    ) -> list[Delivery]:
        """
        Receive messages for a consumer group. They are invisible to its other members for the given time.

        Messages of all tags are returned: during a deployment, the members of a group want different ones. On topics of type fifo
        a message is returned only if all earlier ones of its key are acknowledged, or stand before it in the same list. After a
        loss or a release, a key begins again at its first message that is not acknowledged.

        `Delivery.delivery_count` is 1 only where the message was certainly not returned to the group before. A higher number that
        is wrong costs two statements of the database; a 1 that is wrong is a death of a process that is not counted.

        Args:
            topics: names of topics.
            limit: the maximum number of messages (1 or more).
            wait: return an empty list after this time if no message comes.
        """

    def set_owner(
        self, group: str, source: str, project: str, *, known_topics: Collection[str] = (), take_over: bool = False
    ) -> None:
        """
        Note in which outbox a consumer group has its inbox; called before the first `receive` for the group.

        If the broker can, it stores the owner on its server when the group first receives from a topic. A group of the same name
        with another inbox, that is, of another project, then receives nothing, and `refusals` and `check` name the owner. By
        default nothing is compared.

        Args:
            source: the stable id of the outbox.
            project: its project, for people.
            known_topics: topics from which the group has received, by its inbox: it is not new there, whatever the server
                remembers.
            take_over: store the owner on the server now, in place of the group's owner there. Raises BrokerUnavailable.
        """

    def interrupt(self) -> None:
        """
        End the wait of the current `receive`, and of all later ones: they return what is there. May be called from any thread.

        By default `receive` returns when its wait is over. A broker whose waits take seconds overrides this, since the stop of a
        consumer waits for it.
        """

    @abc.abstractmethod
    def renew(self, deliveries: Sequence[Delivery], invisible_for: timedelta) -> list[Delivery | None]:
        """
        Keep deliveries invisible for the given time from now, and return them with their new receipts.

        None in place of a delivery: it has ended, or the message was or may be delivered again. As for `ack`, an expired delivery
        may still be renewed if the broker knows that nobody else has the message. After a renewal only the returned delivery may
        be used, since its receipt may be a new one.
        """

    def release(self, deliveries: Sequence[Delivery]) -> None:
        """Hand back deliveries that are still held: their messages can be received again at once. May be ignored."""
        self.renew(deliveries, timedelta(0))

    @abc.abstractmethod
    def ack(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """
        Acknowledge deliveries.

        False in place of a delivery: too late, the message was or may be delivered again. An expired delivery may still be
        acknowledged if the broker knows that nobody else has the message. Callers depend on nothing here: an acknowledgement may
        be lost or late.
        """

    @abc.abstractmethod
    def backlog(self, group: str) -> Backlog:
        """Return the number of messages that wait for a group, by topic."""

    def may_deliver_again(self, group: str, message_ids: Collection[str]) -> set[str]:
        """
        Return those of the messages that may be delivered to a group again, because their deliveries have not ended.

        A broker that cannot tell of a message must forget it within `Limits.redelivery`, or a time that its `check` compares.
        """
        return set()

    def forget_group(self, group: str, topics: Collection[str]) -> None:
        """
        Drop what waits for a group in these topics. If the group receives again, it begins as a new one.

        The group's consumers have to be stopped before.

        Raises:
            UnsupportedByBroker: only the server's own tools can do that; the text names them.
        """
        raise UnsupportedByBroker(
            f"{type(self).__name__} cannot drop what waits for a group.", hint="Use the server's own tools."
        )


class Lookups(Capability):
    """Messages can be looked up by their id."""

    @abc.abstractmethod
    def find(self, message_id: str) -> list[StoredCopy]:
        """Return all stored copies of a message. A server may find a copy only a moment after it was stored."""


class HalfMessages(Lookups):
    """
    Half messages: hidden from consumers until a COMMIT.

    The broker must ask about half messages that are not ended: with `NeedsCheckLoop`, with `AsksProducers`, or over HTTP.
    """

    end_semantics: EndSemantics = EndSemantics.STATELESS

    # Where ends are not idempotent: the process that decided a batch may end its half messages for this time, in which
    # check-backs about them are UNKNOWN. Later, a batch must be taken over first (`batches/take_over.py`). None: at any time.
    commit_window: timedelta | None = None
    # Whether several threads may call `new_half_id`, `send_halves` and `end` at once. If so, a process has one broker for all
    # threads that publish half first, otherwise one for each.
    is_thread_safe: ClassVar[bool] = False
    # Whether an accepted end has certainly taken effect. False: the answer only says that the request was forwarded, so the
    # message itself must be looked up before it counts as sent.
    confirms_ends: bool = True

    @abc.abstractmethod
    def new_half_id(self, message_id: str) -> str:
        """Return a new id for a half message before it is sent, for `Outgoing.half_id`."""

    @abc.abstractmethod
    def send_halves(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        """
        Store half messages. Each is sent once; a request is never repeated.

        `SendResult.half_id` identifies the half message, and `SendResult.place` is where it is stored, if the broker can use that
        to find it. Callers pass both back in a `HalfRef`.
        """

    @abc.abstractmethod
    def end(self, halves: Sequence[HalfRef], resolution: Resolution, *, within: timedelta | None = None) -> list[SendResult]:
        """
        Commit or roll back half messages; `SendResult.ended` is the state of each afterwards.

        Args:
            within: send no end later than this from now; the others are UNAVAILABLE. None: no limit.
        """

    @abc.abstractmethod
    def look_up_halves(self, halves: Sequence[HalfRef]) -> list[HalfStatus]:
        """
        Return the states of half messages with a decision to commit, so that none is ended twice or sent again needlessly.

        VISIBLE, HIDDEN and GONE are only returned if they are certain. A problem at the broker is UNKNOWN, never an exception.
        """


class NeedsCheckLoop(HalfMessages):
    """The broker asks about half messages when a relay's process calls `check_halves`, which it does periodically."""

    @abc.abstractmethod
    def check_halves(self, ask: Callable[[Half], Resolution], *, limit: int = 100) -> int:
        """Ask about half messages that are due, and end them as answered. Return the number of questions."""


class AsksProducers(HalfMessages):
    """The server asks processes that listen."""

    @abc.abstractmethod
    def listen(self, ask: Callable[[Half], Resolution], *, note_sent: Callable[[Half, Resolution], None] | None = None) -> None:
        """
        Call `ask`, in threads of the broker, whenever the server asks about a half message, until `close`.

        Args:
            note_sent: called when the server was sent another answer than that of `ask`. For example, a message that is visible
                already must not be committed again: ROLLBACK then only ends the questions.
        """


class GivesUp(Receives):
    """The server gives messages of a group up by itself (a delivery limit, a TTL), and keeps them where they can be read."""

    @abc.abstractmethod
    def receive_given_up(self, group: str, topics: Collection[str], *, limit: int) -> list[Delivery]:
        """
        Receive messages that the server gave up, each with the server's reason in `Delivery.given_up`; `ack` ends them.

        Returns at once. One that is not acknowledged comes again, at the latest in another process.
        """


class TransactionalSends(Capability):
    """
    One-phase messages that become visible together, along with a marker that identifies them.

    A relay's lane has a series of transactions, and one broker client at a time holds the lane. Opening a lane ends the open
    transaction of its last holder and fences that holder out; the marker, and no answer, then says whether the last transaction
    was committed. A lane that is not used afterwards is opened just for that. Each transaction overwrites the lane's marker, so
    record the marker before sending the next one.

    The calls that open and read lanes raise `BrokerUnavailable`: `LaneBlocked` where another lane may be open, or
    `BrokerMisconfigured` where somebody must act first.
    """

    # Outboxes whose lanes `check` looks at, too: their stable ids -> the highest number of a lane.
    checked_lanes: Mapping[str, int] = {}

    @abc.abstractmethod
    def open_lane(self, source: str, lane: int) -> str | None:
        """
        Take a lane over. Return the marker of its last committed transaction; None where there was none.

        Afterwards no transaction of an earlier holder is undecided, and none can be committed any more.

        Args:
            source: the stable id of the outbox whose lane it is; the lanes of two outboxes are not connected.
        """

    @abc.abstractmethod
    def is_lane_open(self, lane: int) -> bool:
        """
        Return whether a transaction can be sent in a lane: it was opened here, and each transaction since ended cleanly.

        This may be False after one that was committed, too. Then the lane has to be opened again, before any message is claimed
        for it.
        """

    @abc.abstractmethod
    def look_at_lane(self, source: str, lane: int) -> str | None:
        """Return the marker of a lane as it is now, and fence nobody out. An open transaction may be about to replace it."""

    def find_away(self, topics: Collection[str]) -> dict[str, str]:
        """
        Return those of some topics that cannot take messages now, with the reasons.

        A transaction must not contain their messages: it could not end, and would block its lane. By default none.
        """
        return {}

    @abc.abstractmethod
    def send_transaction(self, lane: int, messages: Sequence[Outgoing], marker: str) -> list[SendResult]:
        """
        Send messages and a marker in one transaction of a lane: either all become visible, or none.

        Either all results are ACCEPTED, and the transaction is committed; or all are UNSURE, and only the marker tells; or none
        is ACCEPTED or UNSURE, and nothing is stored, now or later: the rejected ones are REFUSED or MISCONFIGURED, the others
        UNAVAILABLE. In a lane that is not open all are UNAVAILABLE. A transaction of a marker alone, whose result is an empty
        list, was committed if the lane is still open.
        """


class StoredInDatabase(Lookups):
    """
    The broker keeps its messages in tables, which can be read without the broker.

    They are in the database that OPTIONS["DATABASE"] names, by default "default" (`conf.stored_in`). Calls of the class raise
    NotMigrated where tables are missing.
    """

    @classmethod
    @abc.abstractmethod
    def read_status(cls, database: str, connection: Connection) -> tuple[dict[str, int], list[str]]:
        """
        Return what operators should know about the broker's tables, over a connection to their database.

        Returns:
            Topic -> half messages that the broker has stopped asking about; the consumer groups that it keeps messages for.
        """

    @classmethod
    @abc.abstractmethod
    def read_copies(cls, database: str, connection: Connection, message_id: str, half_ids: Sequence[str]) -> list[StoredCopy]:
        """Return the stored copies of a message, and of its half messages by their ids, over a connection to their database."""

    @classmethod
    @abc.abstractmethod
    def list_stored(cls, options: Mapping[str, Any], topics: Sequence[TopicSpec], connection: Connection) -> list[StoredList]:
        """
        Return what is still to be delivered to consumer groups, over a connection to the broker's database.

        Args:
            topics: those of settings; their groups begin to read where they have not yet.
        """


class SpeaksKafka(Capability):
    """Any client of Kafka can read the topics, so Spark can: OPTIONS have SERVERS, a list, and CLIENT, librdkafka's settings."""


class ListsResources(Capability):
    """The resources of topics and consumer groups at the server can be listed, and missing ones created."""

    @abc.abstractmethod
    def list_resources(self, *, sources: Collection[str], lanes: int, readers: Collection[str]) -> list[ServerResource]:
        """
        Return what the topics need at the server, in the order in which it can be created. Nothing is created or changed.

        Args:
            sources: the stable ids of the outboxes whose relays send here.
            lanes: the highest number of a relay's lane.
            readers: groups without handlers that may read all topics. Nothing may be stored for them before they first receive.

        Raises:
            BrokerUnavailable: the server does not answer, or refuses this user.
        """


class Seeks(Receives):
    """A consumer group without consumers can be moved to another place in a topic."""

    @abc.abstractmethod
    def seek(
        self,
        group: str,
        topics: Collection[str],
        to: datetime | Literal["first", "last"],
        *,
        confirm: Callable[[list[GroupPosition]], object],
    ) -> list[GroupPosition]:
        """
        Move a group to another place in topics. Return the positions that change.

        Args:
            to: the first message, behind the last one, or the first one stored since a time.
            confirm: called with these positions before, if there are any; an exception of it leaves everything as it is.

        Raises:
            BrokerUnavailable: the group has consumers, or the broker cannot be reached. Nothing is done.
        """
