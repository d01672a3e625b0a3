"""
What every broker must do. A broker carries messages; it knows neither outbox nor inbox rows.

Sends, ends, renewals and acks take a batch, so that a network broker can pipeline. A call that returns `SendResult`
returns one for each message, in their order, and raises only for a programming error: trouble at the broker is a result
(`UNAVAILABLE`, `UNSURE`). Every other call raises `BrokerUnavailable` when the broker is out of reach.

What only some brokers offer stands in `capabilities.py`, a small class for each. The values of `types.py` are imported
from here.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar

from outbox.brokers.types import (
    BrokerStatus,
    DeadLetter,
    DeadLetterCount,
    Delivery,
    Ended,
    EndSemantics,
    HalfRef,
    HalfStanding,
    Outgoing,
    Problem,
    SendResult,
    SendStatus,
    StoredCopy,
)
from outbox.message import Half, TopicSpec

DEFAULT_MAX_BODY_BYTES = 4 * 1024 * 1024


class Broker(abc.ABC):
    """
    Carries messages from relays to consumer groups.

    Create it in the process that uses it, after any fork. One thread makes every call but four: `renew` and `release` may come
    from a second thread, whatever call the first is in; `interrupt` and `close` may come from any thread, and after `close` a
    call that is under way returns early or raises `BrokerUnavailable`.

    Args:
        alias: the broker's name in `OUTBOX["BROKERS"]`.
        options: its OPTIONS, as written there.
        topics: the topics that settings give to it.
    """

    system: ClassVar[str] = "outbox"  # as OpenTelemetry's messaging.system has it
    app: ClassVar[str] = ""  # the Django app that has the broker's tables; a system check asks for it in INSTALLED_APPS

    # How it does what every broker does.
    supports_order: ClassVar[bool] = False
    supports_delay: ClassVar[bool] = False
    deduplicates_sends: ClassVar[bool] = False  # what is sent again is not stored again; see `DeadLetters.deliver_again`
    is_durable: ClassVar[bool] = True  # False: messages are gone with the process, so it is for tests only
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_delay: timedelta = timedelta(days=365)  # `Outgoing.deliver_at` lies no further ahead; the outbox keeps it till then

    # What it does besides; each is set by its class in `capabilities.py`.
    supports_lookups: ClassVar[bool] = False
    supports_half_messages: ClassVar[bool] = False
    needs_check_loop: ClassVar[bool] = False
    asks_producers: ClassVar[bool] = False
    supports_replay: ClassVar[bool] = False
    supports_transactional_sends: ClassVar[bool] = False
    is_stored_in_database: ClassVar[bool] = False

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
        """Return which topics of settings these OPTIONS cannot serve, or not as well, without a connection."""
        return []

    @classmethod
    def max_send_duration(cls, options: Mapping[str, Any]) -> timedelta:
        """Return how long a send of one batch may take when each request takes its whole time-out. A lease must outlast it."""
        return timedelta()

    def check(self) -> list[Problem]:
        """Return what is wrong with the options, and with the topics as the running broker knows them."""
        return self.check_options(self.options)

    @abc.abstractmethod
    def send(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        """Send one-phase messages and wait for each answer."""

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
        Take messages for a consumer group; they stay invisible to its other members for that long.

        Whatever is on the topics comes, of all tags: during a deployment the members of a group want different ones.

        Args:
            topics: their names.
            limit: at most this many messages (1 or more).
            wait: return an empty list after this time when nothing comes.
        """

    def interrupt(self) -> None:  # noqa: B027  (a broker whose waits are short does without)
        """
        End the wait of a `receive` under way, and of each later one: it returns what there is. From any thread.

        By default it ends when its wait is over. Where that may take seconds, whoever stops a consumer would wait for it.
        """

    @abc.abstractmethod
    def renew(self, deliveries: Sequence[Delivery], invisible_for: timedelta) -> list[Delivery | None]:
        """
        Keep deliveries invisible for that long from now, and return each as it is named from now on.

        None: the delivery is done, or the message was or may be handed out again. As for `ack`, a delivery whose time is over,
        and that nobody else was handed, may still be renewed where the broker can tell. Of a delivery that was renewed only the
        new one may be used: its receipt may be another.
        """

    def release(self, deliveries: Sequence[Delivery]) -> None:
        """Hand back deliveries that are still held: the group's other members may have their messages at once."""
        self.renew(deliveries, timedelta(0))

    @abc.abstractmethod
    def ack(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """
        Mark deliveries as done.

        False: too late, the message was or may be handed out again. A delivery whose time is over, and that nobody else was
        handed, may still be ended where the broker can tell.
        """

    @abc.abstractmethod
    def retry(self, delivery: Delivery, after: timedelta) -> bool:
        """Return a message to its group, to be delivered again after that time. False as for `ack`."""

    @abc.abstractmethod
    def dead_letter(self, delivery: Delivery, reason: str) -> bool:
        """Put a message aside for an operator; the group goes on with the next. False as for `ack`."""

    @abc.abstractmethod
    def backlog(self, group: str) -> dict[str, int]:
        """Return, per topic, how many messages wait for a group, those being handled included."""

    def may_deliver_again(self, group: str, message_ids: Collection[str]) -> set[str]:
        """
        Return which of these messages may come to a group again, though it has handled them: their deliveries are not ended.

        A broker that cannot tell returns none, and forgets a message within a time that `check` compares with the settings.
        """
        return set()

    def prune(self, *, keep_since: datetime | None = None) -> int:
        """
        Delete some of what retention no longer keeps. Return how many messages; 0 when nothing is left to delete.

        Args:
            keep_since: what was stored since then stays, since the end of a half message of that time is not confirmed yet.
        """
        return 0

    @abc.abstractmethod
    def close(self) -> None:
        """Close what is open; a second call does nothing. The broker is not used afterwards."""


__all__ = [
    "DEFAULT_MAX_BODY_BYTES",
    "Broker",
    "BrokerStatus",
    "DeadLetter",
    "DeadLetterCount",
    "Delivery",
    "EndSemantics",
    "Ended",
    "Half",
    "HalfRef",
    "HalfStanding",
    "Outgoing",
    "Problem",
    "SendResult",
    "SendStatus",
    "StoredCopy",
    "TopicSpec",
]
