"""
What every broker must do. A broker carries messages; it knows neither outbox nor inbox rows.

Sends, ends, renewals and acks take a batch, so that a network broker can pipeline. A call that returns `SendResult`
returns one for each message, in their order, and raises only for a programming error: a problem at the broker is a result
(`UNAVAILABLE`, `UNSURE`). Every other call raises `BrokerUnavailable` when the broker cannot be reached.

Features of some brokers only are in `capabilities.py`, a small class for each. Import the types of `types.py` from here.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar

from outbox.brokers.asyncapi import BrokerInterface
from outbox.brokers.types import (
    ACCEPTED,
    BrokerStatus,
    Delivery,
    Ended,
    EndSemantics,
    GroupPosition,
    HalfRef,
    HalfStatus,
    Outgoing,
    Problem,
    SendGuarantee,
    SendResult,
    SendStatus,
    ServerResource,
    StoredCopy,
    StoredList,
)
from outbox.errors import UnsupportedByBroker
from outbox.message import Half, TopicSpec, TopicType

DEFAULT_MAX_BODY_BYTES = 4 * 1024 * 1024


class Broker(abc.ABC):
    """
    Carries messages from relays to consumer groups.

    A broker is created in the process that uses it, after any fork. One thread makes all calls except some: `renew` and `ack`
    may be called by a second thread, also during a call of the first; `interrupt`, `close` and `refusals` by any thread, and
    the last one returns at once. After `close`, a call in progress returns early or raises `BrokerUnavailable`.

    Args:
        alias: the broker's name in `OUTBOX["BROKERS"]`.
        options: its OPTIONS, as written there.
        topics: its topics in the settings.
    """

    system: ClassVar[str] = "outbox"  # OpenTelemetry's messaging.system
    app: ClassVar[str] = ""  # the Django app with the broker's tables, which a system check requires in INSTALLED_APPS
    reserved_topics: ClassVar[tuple[str, ...]] = ()  # topics that it has without an entry in TOPICS, and nobody else may have

    # Properties of the calls below.
    supports_order: ClassVar[bool] = False
    supports_delay: ClassVar[bool] = False
    deduplicates_sends: ClassVar[bool] = False  # a repeated send is not stored again; see `DeliversAgain`
    is_durable: ClassVar[bool] = True  # False: messages are lost when the process ends, so it is for tests only
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_delay: timedelta = timedelta(days=365)  # longer delays are spent in the outbox's tables first

    # Features of its base classes, from `capabilities.py`, that it does not have, for example because of its options.
    lacks: Collection[type] = ()

    def __init__(self, alias: str, options: Mapping[str, Any], topics: Sequence[TopicSpec]) -> None:
        self.alias = alias
        self.options = options
        self.topics = {topic.name: topic for topic in topics}

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> list[Problem]:
        """Return what is wrong with the OPTIONS, without a connection."""
        return []

    @classmethod
    def check_topics(cls, options: Mapping[str, Any], topics: Sequence[TopicSpec]) -> list[Problem]:
        """Return the topics in settings that cannot be served with these OPTIONS, or not well, without a connection."""
        return []

    @classmethod
    def max_send_duration(cls, options: Mapping[str, Any]) -> timedelta:
        """Return how long a send of one batch takes if every request takes its full timeout. A lease must be longer."""
        return timedelta()

    @classmethod
    def max_handling_time(cls, options: Mapping[str, Any], kind: TopicType) -> timedelta | None:
        """Return how long a delivery of such a topic can be held, renewals included. None: for any time."""
        return None

    @classmethod
    def redelivery_time(cls, options: Mapping[str, Any], topic: TopicSpec) -> timedelta | None:
        """
        Return how long after it was handled a message that `may_deliver_again` does not name may come to its group again.

        Its inbox row must be kept as long, which a system check compares. None: the options do not tell; then `check` compares
        with the server's settings.
        """
        return None

    @classmethod
    def body_limit(cls, options: Mapping[str, Any]) -> int:
        """Return the size of the largest body in bytes."""
        return cls.max_body_bytes

    @classmethod
    def send_guarantee(cls, options: Mapping[str, Any], kind: TopicType) -> SendGuarantee:
        """Return how often the readers of such a topic see a published message."""
        return SendGuarantee.ONCE if cls.deduplicates_sends else SendGuarantee.AT_LEAST_ONCE

    @classmethod
    def interface(cls, options: Mapping[str, Any]) -> BrokerInterface:
        """Return how programs without the outbox read its messages, for `outbox_catalogue --asyncapi`."""
        return BrokerInterface(cls.system)

    def check(self) -> list[Problem]:
        """Return what is wrong with the options, and with the topics on the running broker."""
        return self.check_options(self.options)

    @abc.abstractmethod
    def send(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        """Send one-phase messages and wait for all answers."""

    @abc.abstractmethod
    def receive(
        self,
        group: str,
        topics: Collection[str],
        *,
        limit: int,
        invisible_for: timedelta,
        wait: timedelta,
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

    def set_owner(self, group: str, source: str, project: str) -> None:  # noqa: B027  (a broker may be unable to compare)
        """
        Note in which outbox a consumer group has its inbox; called before the first `receive` for the group.

        If the broker can, it stores the owner on its server when the group first receives from a topic. A group of the same name
        with another inbox, that is, of another project, then receives nothing, and `refusals` and `check` name the owner. By
        default nothing is compared.

        Args:
            source: the stable id of the outbox.
            project: its project, for people.
        """

    def set_known_topics(self, group: str, topics: Collection[str]) -> None:  # noqa: B027  (most servers forget no group)
        """Note topics from which a group has received, by its inbox: it is not new there, whatever the server remembers."""

    def take_over(self, group: str) -> None:  # noqa: B027
        """Store the owner of `set_owner` on the server, in place of a group's owner there. Raises BrokerUnavailable."""

    def interrupt(self) -> None:  # noqa: B027  (a broker whose waits are short does without)
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
    def backlog(self, group: str) -> dict[str, int]:
        """Return the number of messages that wait for a group, by topic, including those being handled."""

    def refusals(self) -> dict[str, str]:
        """Return the topics that `receive` was asked for and cannot receive from as configured, each with the reason."""
        return {}

    def delayed(self) -> int | None:
        """Return the number of messages whose delay is not over, and that `backlog` does not count. None: it cannot tell."""
        return None

    def may_deliver_again(self, group: str, message_ids: Collection[str]) -> set[str]:
        """
        Return those of the messages that may be delivered to a group again, because their deliveries have not ended.

        A broker that cannot tell of a message must forget it within `redelivery_time`, or a time that its `check` compares.
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

    def prune(self, *, keep_since: datetime | None = None) -> int:
        """
        Delete some messages that are past their retention. Return their number; 0 when nothing is left to delete.

        Args:
            keep_since: keep everything stored since then, because the end of a half message of that time is not confirmed yet.
        """
        return 0

    @abc.abstractmethod
    def close(self) -> None:
        """Close all connections. A second call does nothing. The broker is not used afterwards."""


__all__ = [
    "ACCEPTED",
    "DEFAULT_MAX_BODY_BYTES",
    "Broker",
    "BrokerInterface",
    "BrokerStatus",
    "Delivery",
    "EndSemantics",
    "Ended",
    "GroupPosition",
    "Half",
    "HalfRef",
    "HalfStatus",
    "Outgoing",
    "Problem",
    "SendGuarantee",
    "SendResult",
    "SendStatus",
    "ServerResource",
    "StoredCopy",
    "StoredList",
    "TopicSpec",
]
