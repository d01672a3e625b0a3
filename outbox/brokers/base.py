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

    A broker is created in the process that uses it, after any fork. One thread makes all calls except some: `renew` and `ack`
    may be called by a second thread, also during a call of the first; `interrupt` and `close` by any thread. After `close`, a
    call in progress returns early or raises `BrokerUnavailable`.

    Args:
        alias: the broker's name in `OUTBOX["BROKERS"]`.
        options: its OPTIONS, as written there.
        topics: its topics in the settings.
    """

    system: ClassVar[str] = "outbox"  # OpenTelemetry's messaging.system
    interface: ClassVar[type[BrokerInterface]] = BrokerInterface  # how other programs read it, for `outbox_catalogue --asyncapi`
    app: ClassVar[str] = ""  # the Django app with the broker's tables, which a system check requires in INSTALLED_APPS
    reserved_topics: ClassVar[tuple[str, ...]] = ()  # topics that it has without an entry in TOPICS, and nobody else may have

    # Properties of the calls below.
    supports_order: ClassVar[bool] = False
    supports_delay: ClassVar[bool] = False
    deduplicates_sends: ClassVar[bool] = False  # a repeated send is not stored again
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    is_durable: ClassVar[bool] = True  # False: messages are lost when the process ends, so it is for tests only
    max_delay: timedelta = timedelta(days=365)  # longer delays are spent in the outbox's tables first

    # Features of its base classes, from `capabilities.py`, that it does not have, for example because of its options.
    lacks: Collection[type] = ()

    def __init__(self, alias: str, options: Mapping[str, Any], topics: Sequence[TopicSpec]) -> None:
        self.alias = alias
        self.options = options
        self.topics = {topic.name: topic for topic in topics}

    @classmethod
    def check_settings(cls, options: Mapping[str, Any], topics: Sequence[TopicSpec] = ()) -> list[Finding]:
        """Return what is wrong with the OPTIONS, else with topics that cannot be served with them, without a connection."""
        return []

    @classmethod
    def limits(cls, options: Mapping[str, Any], topic: TopicSpec) -> Limits:
        """Return what such a topic is promised with these OPTIONS, within which times, and how large its messages may be."""
        guarantee = SendGuarantee.ONCE if cls.deduplicates_sends else SendGuarantee.AT_LEAST_ONCE
        return Limits(guarantee, body_bytes=cls.max_body_bytes)

    def check(self) -> list[Finding]:
        """Return what is wrong with the options, and with the topics on the running broker."""
        return self.check_settings(self.options, list(self.topics.values()))

    @abc.abstractmethod
    def send(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        """Send one-phase messages and wait for all answers."""

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
