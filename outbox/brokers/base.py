"""
The contract of all brokers. A broker carries messages; it knows neither outbox nor inbox rows.

Calls that send, renew, acknowledge or end take several messages, so that a broker behind a network can pipeline. (To end a half
message is to commit it or roll it back.) A call that returns `SendResult` returns one for each message, in their order. It raises
only for a programming error, since a problem at the broker is a result (`UNAVAILABLE`, `UNSURE`). Every other call raises
`BrokerUnavailable` if the broker cannot be reached.

Features that only some brokers have are in `capabilities.py`, a small class for each. Import the types of `types.py` from here.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar

from outbox.brokers.asyncapi import BrokerInterface
from outbox.brokers.types import (
    ACCEPTED,
    DEFAULT_MAX_BODY_BYTES,
    Backlog,
    Delivery,
    Ended,
    EndSemantics,
    GroupPosition,
    HalfRef,
    HalfStatus,
    Limits,
    Outgoing,
    ReadPage,
    SendGuarantee,
    SendResult,
    SendStatus,
    ServerResource,
    StoredCopy,
    StoredList,
)
from outbox.findings import Finding
from outbox.message import Half, TopicSpec


class Broker(abc.ABC):
    """
    Carries messages from relays to consumer groups.

    A broker is created in the process that uses it, after any fork. One thread makes the calls, with these exceptions: a second
    thread may call `renew` and `ack`, even during a call of the first one; any thread may call `interrupt` and `close`. After
    `close`, a call in progress returns early or raises `BrokerUnavailable`.

    Args:
        alias: the broker's name in `OUTBOX["BROKERS"]`.
        options: the broker's OPTIONS, as written there.
        topics: the broker's topics in settings.
    """

    system: ClassVar[str] = "outbox"  # the value of OpenTelemetry's messaging.system
    interface: ClassVar[type[BrokerInterface]] = BrokerInterface  # describes the broker in `outbox_catalogue --asyncapi`
    app: ClassVar[str] = ""  # the Django app with the broker's tables, which a system check requires in INSTALLED_APPS
    reserved_topics: ClassVar[tuple[str, ...]] = ()  # names of topics that it has without an entry in TOPICS; no other broker may

    # Properties of the calls below.
    supports_order: ClassVar[bool] = False
    supports_delay: ClassVar[bool] = False
    deduplicates_sends: ClassVar[bool] = False  # a message that is sent again is not stored again
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    is_durable: ClassVar[bool] = True  # False: messages are lost when the process ends, as in a broker for tests
    max_delay: timedelta = timedelta(days=365)  # for a longer delay, a message first waits in the outbox's tables

    # Capabilities that are base classes of the broker, but that it does not have, for example because of its options.
    lacks: Collection[type] = ()

    def __init__(self, alias: str, options: Mapping[str, Any], topics: Sequence[TopicSpec]) -> None:
        self.alias = alias
        self.options = options
        self.topics = {topic.name: topic for topic in topics}

    @classmethod
    def check_settings(cls, options: Mapping[str, Any], topics: Sequence[TopicSpec] = ()) -> list[Finding]:
        """
        Return the problems of OPTIONS; if there are none, those of topics that cannot be served with these OPTIONS.

        This makes no connection.
        """
        return []

    @classmethod
    def limits(cls, options: Mapping[str, Any], topic: TopicSpec) -> Limits:
        """Return the guarantee, the times and the maximum body size that a topic has with these OPTIONS."""
        guarantee = SendGuarantee.ONCE if cls.deduplicates_sends else SendGuarantee.AT_LEAST_ONCE
        return Limits(guarantee, body_bytes=cls.max_body_bytes)

    def check(self) -> list[Finding]:
        """Return the problems of the options, and of the topics on the running broker."""
        return self.check_settings(self.options, list(self.topics.values()))

    @abc.abstractmethod
    def send(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        """Send one-phase messages and wait for all answers."""

    def prune(self, *, keep_since: datetime | None = None) -> int:
        """
        Delete some messages that are past their retention. Return their number; 0 if none are left.

        Args:
            keep_since: keep all messages that were stored since then, because the commit of a half message of that time is not
                confirmed yet.
        """
        return 0

    @abc.abstractmethod
    def close(self) -> None:
        """Close all connections. A second call does nothing. The broker is not used afterwards."""


__all__ = [
    "ACCEPTED",
    "DEFAULT_MAX_BODY_BYTES",
    "Backlog",
    "Broker",
    "BrokerInterface",
    "Delivery",
    "EndSemantics",
    "Ended",
    "GroupPosition",
    "Half",
    "HalfRef",
    "HalfStatus",
    "Limits",
    "Outgoing",
    "ReadPage",
    "SendGuarantee",
    "SendResult",
    "SendStatus",
    "ServerResource",
    "StoredCopy",
    "StoredList",
    "TopicSpec",
]
