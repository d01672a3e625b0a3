"""
Capabilities: features that only some brokers have. Each is a small class, which a broker adds to its bases.

`HalfMessages.has(broker)`, for example, returns whether a broker, or a broker class, has half messages. If so,
`HalfMessages.of(broker)` returns the broker with that type. For a broker class, type checkers need `issubclass` in addition.

To end a half message is to commit it or roll it back.
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
    """Base class of capabilities."""

    @classmethod
    def has(cls, broker: Broker | type[Broker]) -> bool:
        """Return whether a broker, or a broker class, has this feature."""
        kind = broker if isinstance(broker, type) else type(broker)
        return issubclass(kind, cls) and not issubclass(cls, tuple(broker.lacks))

    @classmethod
    def of(cls, broker: Broker) -> Self:
        """
        Return the broker unchanged; for type checkers, it is one with this feature.

        Raises:
            UnsupportedByBroker: the broker does not have the feature.
        """
        if not cls.has(broker):
            name = type(broker).__name__
            raise UnsupportedByBroker(f"{name} has no {cls.__name__}.", hint=f"Check {cls.__name__}.has(broker) first.")
        return cast("Self", broker)


class Receives(Capability):
    """Consumer groups receive the messages; each group receives all of them."""

    # Topic -> reason, if `receive` was called for a topic from which it cannot receive until the configuration is corrected. Any
    # thread may read this.
    refusals: Mapping[str, str] = {}

    @abc.abstractmethod
    def receive(
        self, group: str, topics: Collection[str], *, limit: int, invisible_for: timedelta, wait: timedelta
    ) -> list[Delivery]:
        """
        Receive messages for a consumer group. They are invisible to the group's other members for the given time.

        Messages of all tags are returned, since the members of a group may want different tags during a deployment. On topics of
        type fifo, a message is returned only if all earlier messages of its key are acknowledged or precede it in the same list.
        If a delivery is lost or released, its key starts again from the first unacknowledged message.

        `Delivery.delivery_count` is 1 only if the message was certainly not returned to the group before. If a higher number is
        wrong, two database statements are wasted. If a 1 is wrong, the death of a process during the handling is not counted.

        Args:
            topics: names of topics.
            limit: the maximum number of messages (1 or more).
            wait: return an empty list after this time if no message comes.
        """

    def set_owner(
        self, group: str, source: str, project: str, *, known_topics: Collection[str] = (), take_over: bool = False
    ) -> None:
        """
        Record the owner of a consumer group: the outbox with the group's inbox. Called before the first `receive` for the group.

        If the broker can, it stores the owner on its server when the group first receives from a topic. A group of the same name
        in another project, which has another inbox, then receives nothing, and `refusals` and `check` name the owner. By default,
        nothing is stored or compared.

        Args:
            source: the stable id of the outbox.
            project: its project, for people.
            known_topics: topics from which the group has received before, according to its inbox. The group is not new there,
                even if the server has forgotten it.
            take_over: replace the owner on the server now. If this fails, BrokerUnavailable is raised.
        """

    def interrupt(self) -> None:
        """
        End the wait of the current `receive` and of all later ones, which return without waiting. Any thread may call this.

        By default this does nothing, and `receive` returns when its wait is over. A broker whose waits take seconds overrides it,
        since a consumer that is stopped waits for `receive`.
        """

    @abc.abstractmethod
    def renew(self, deliveries: Sequence[Delivery], invisible_for: timedelta) -> list[Delivery | None]:
        """
        Keep deliveries invisible for the given time from now, and return them with their new receipts.

        None in place of a delivery: it is no longer held, since it was settled, or the message was or may be delivered again. As
        with `ack`, an expired delivery may still be renewed if the broker knows that nobody else has the message. After a renewal
        only the returned delivery may be used, since it may have a new receipt.
        """

    def release(self, deliveries: Sequence[Delivery]) -> None:
        """Release deliveries that are still held, so that their messages can be received again at once. May be ignored."""
        self.renew(deliveries, timedelta(0))

    @abc.abstractmethod
    def ack(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """
        Acknowledge deliveries.

        False in place of a delivery: it is too late, and the message was or may be delivered again. An expired delivery may still
        be acknowledged if the broker knows that nobody else has the message. Callers must not rely on an acknowledgement, since
        it may be lost or late.
        """

    @abc.abstractmethod
    def backlog(self, group: str) -> Backlog:
        """Return the number of messages that wait for a group, by topic."""

    def may_deliver_again(self, group: str, message_ids: Collection[str]) -> set[str]:
        """
        Return the ids of those messages that may be delivered to a group again, because their deliveries are not settled.

        If a broker does not know this of a message, it must not deliver the message later than `Limits.redelivery` after it was
        handled. If that is None, a setting of the server is the limit; `check` compares it with the retention of inbox rows.
        """
        return set()

    def forget_group(self, group: str, topics: Collection[str]) -> None:
        """
        Drop the messages that wait for a group in these topics. If the group receives again, it starts like a new group.

        The group's consumers must be stopped first.

        Raises:
            UnsupportedByBroker: only the server's tools can drop them; the text names a tool.
        """
        raise UnsupportedByBroker(
            f"{type(self).__name__} cannot drop the messages that wait for a group.", hint="Use the server's tools."
        )


class Lookups(Capability):
    """Messages can be looked up by their id."""

    @abc.abstractmethod
    def find(self, message_id: str) -> list[StoredCopy]:
        """Return all stored copies of a message. A server may not find a copy in the first moments after it was stored."""


class HalfMessages(Lookups):
    """
    Half messages: they are hidden from consumers until a COMMIT.

    The broker must send check-backs about half messages that are not ended: through `NeedsCheckLoop`, `AsksProducers`, or HTTP.
    """

    end_semantics: EndSemantics = EndSemantics.STATELESS

    # If ends are not idempotent: for this time after its decision, the process that decided a batch may end the half messages,
    # and check-backs about them are answered UNKNOWN. After that, another process may, once it has taken the batch over
    # (`batches/take_over.py`). None: any process may end them at any time.
    commit_window: timedelta | None = None
    # Whether several threads may call `new_half_id`, `send_halves` and `end` at once. If so, all threads of a process that
    # publish half first share one broker; otherwise each has its own.
    is_thread_safe: ClassVar[bool] = False
    # Whether an accepted end has certainly taken effect. False: the answer only says that the request was forwarded.
    confirms_ends: bool = True

    @abc.abstractmethod
    def new_half_id(self, message_id: str) -> str:
        """Return a new id for a half message before it is sent, for `Outgoing.half_id`."""

    @abc.abstractmethod
    def send_halves(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        """
        Store half messages. Each is sent once; a request is never repeated.

        `SendResult.half_id` identifies the half message, and `SendResult.place` says where it is stored, if the broker needs this
        to find it. Callers pass both back in a `HalfRef`.
        """

    @abc.abstractmethod
    def end(self, halves: Sequence[HalfRef], resolution: Resolution, *, within: timedelta | None = None) -> list[SendResult]:
        """
        Commit or roll back half messages; `SendResult.ended` is the state of each one afterwards.

        Args:
            within: send no request later than this time from now; the half messages that remain are UNAVAILABLE. None: no limit.
        """

    @abc.abstractmethod
    def look_up_halves(self, halves: Sequence[HalfRef]) -> list[HalfStatus]:
        """
        Return the states of half messages that were decided to be committed, so that none is committed twice or needlessly
        resent.

        VISIBLE, HIDDEN and GONE are returned only if they are certain. A problem at the broker is UNKNOWN, never an exception.
        """


class NeedsCheckLoop(HalfMessages):
    """The broker asks about half messages when a relay's process calls `check_halves`, which it does periodically."""

    @abc.abstractmethod
    def check_halves(self, ask: Callable[[Half], Resolution], *, limit: int = 100) -> int:
        """Call `ask` about half messages whose check-back is due, and end them as it answers. Return the number of calls."""


class AsksProducers(HalfMessages):
    """The server sends check-backs to processes that listen."""

    @abc.abstractmethod
    def listen(
        self, ask: Callable[[Half], Resolution], *, on_other_answer: Callable[[Half, Resolution], None] | None = None
    ) -> None:
        """
        Call `ask`, in threads of the broker, for each check-back of the server, until `close`.

        Args:
            on_other_answer: called if the broker answers the server otherwise than `ask` did, with that answer. For example, a
                message that is visible already must not be committed again, so the broker sends ROLLBACK, which only ends the
                check-backs.
        """


class HasDeadLetterQueue(Receives):
    """The server itself moves messages of a group to a dead-letter queue, for example over a delivery limit or after a TTL."""

    @abc.abstractmethod
    def receive_dead_letters(self, group: str, topics: Collection[str], *, limit: int) -> list[Delivery]:
        """
        Receive messages from the server's dead-letter queues, each with the server's reason in `Delivery.dead_letter_reason`.

        Returns without waiting. `ack` removes a message; an unacknowledged one is returned again, at the latest to another
        process.
        """


class TransactionalSends(Capability):
    """
    One-phase messages that become visible together, in a transaction with a marker that identifies it.

    A relay sends its transactions in a lane, one after the other; one broker client at a time holds the lane. A client that opens
    a lane ends the unfinished transaction of the lane's last holder and fences that holder out: it can send nothing more there.
    Only the lane's marker then tells whether the last transaction was committed, so a client may open a lane just to learn this.
    Each transaction overwrites the lane's marker, so record the marker before the next transaction is sent.

    The calls that open and read lanes raise `BrokerUnavailable`: its subclass `LaneBlocked` if only this lane cannot be opened,
    or its subclass `BrokerMisconfigured` if an operator must act first.
    """

    # Outboxes whose lanes `check` examines, too: stable id of the outbox -> its highest number of a lane.
    checked_lanes: Mapping[str, int] = {}

    @abc.abstractmethod
    def open_lane(self, source: str, lane: int) -> str | None:
        """
        Open a lane, and fence its last holder out. Return the marker of the last committed transaction; None if there is none.

        Afterwards no transaction of an earlier holder is undecided, and none can still be committed.

        Args:
            source: the stable id of the outbox that has the lane; lanes of different outboxes are independent.
        """

    @abc.abstractmethod
    def is_lane_open(self, lane: int) -> bool:
        """
        Return whether a transaction can be sent in a lane: this client opened it, and each transaction since then ended cleanly.

        This may be False even after a committed transaction. Then the lane must be opened again before messages are claimed for
        it.
        """

    @abc.abstractmethod
    def read_lane_marker(self, source: str, lane: int) -> str | None:
        """Return the current marker of a lane, and fence nobody out: an unfinished transaction may still replace the marker."""

    def find_unavailable(self, topics: Collection[str]) -> dict[str, str]:
        """
        Return topic -> reason for those of the given topics that cannot take messages now; by default, for none.

        A transaction must not contain messages of these topics, since it could not end and would block its lane.
        """
        return {}

    @abc.abstractmethod
    def send_transaction(self, lane: int, messages: Sequence[Outgoing], marker: str) -> list[SendResult]:
        """
        Send messages and a marker in one transaction of a lane: either all become visible, or none.

        Either all results are ACCEPTED, and the transaction is committed. Or all are UNSURE, and only the marker tells whether it
        is. Or no result is ACCEPTED or UNSURE, and nothing is stored, now or later: rejected messages are REFUSED or
        MISCONFIGURED, the others UNAVAILABLE. In a lane that is not open all are UNAVAILABLE. A transaction with a marker only
        has no results; it is committed if the lane is still open afterwards.
        """


class StoredInDatabase(Lookups):
    """
    The broker keeps its messages in tables, which can be read without the broker.

    The tables are in the database that OPTIONS["DATABASE"] names, by default "default"
    (`conf.database_of_broker`). The methods of this class raise NotMigrated if tables are missing.
    """

    @classmethod
    @abc.abstractmethod
    def read_status(cls, database: str, connection: Connection) -> tuple[dict[str, int], list[str]]:
        """
        Return the state of the broker's tables for operators, over a connection to their database.

        Returns:
            Topic -> number of half messages about which the broker has stopped asking; the groups for which it keeps messages.
        """

    @classmethod
    @abc.abstractmethod
    def read_copies(cls, database: str, connection: Connection, message_id: str, half_ids: Sequence[str]) -> list[StoredCopy]:
        """Return the stored copies of a message, and of its half messages by their ids, over a connection to their database."""

    @classmethod
    @abc.abstractmethod
    def list_stored(cls, options: Mapping[str, Any], topics: Sequence[TopicSpec], connection: Connection) -> list[StoredList]:
        """
        Return the messages that are still to be delivered to consumer groups, over a connection to the broker's database.

        Args:
            topics: the topics in settings, with their groups, some of which may not have begun to read.
        """


class SpeaksKafka(Capability):
    """Any Kafka client can read the topics, so Spark can. OPTIONS has the list SERVERS, and in CLIENT librdkafka's settings."""


class ListsResources(Capability):
    """The server's resources for topics and consumer groups can be listed, and missing ones can be created."""

    @abc.abstractmethod
    def list_resources(self, *, sources: Collection[str], lanes: int, readers: Collection[str]) -> list[ServerResource]:
        """
        Return the resources that the topics need at the server, in the order in which they can be created. Nothing is changed.

        Args:
            sources: the stable ids of the outboxes whose relays send here.
            lanes: the highest number of a relay's lane.
            readers: groups without handlers that may read all topics. No messages may be kept for them before they first receive.

        Raises:
            BrokerUnavailable: the server does not answer, or denies access to this user.
        """


class Seeks(Receives):
    """A consumer group without consumers can be moved to another position in a topic."""

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
        Move a group to another position in topics. Return the positions that change.

        Args:
            to: the first message, the position after the last message, or the first message that was stored since a time.
            confirm: called with the positions that will change, if there are any. If it raises, nothing is changed.

        Raises:
            BrokerUnavailable: the group has consumers, or the broker cannot be reached. Nothing is changed.
        """
