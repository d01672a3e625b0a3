"""
What a broker owes, on one page. A broker carries messages; it knows neither outbox nor inbox rows.

Every call speaks in batches, so that a network broker can pipeline. A call gives one outcome per message, in the order
of the messages, and raises only for a programming error: the broker's trouble is an outcome (`UNAVAILABLE`, `UNSURE`).
A call without outcomes (`new_half_id`, `receive`, `ack`, `retry`, `dead_letter`, `backlog`, `find`) raises
`BrokerUnavailable` instead.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from outbox.errors import UnsupportedByBroker
from outbox.message import Half, Resolution, TopicSpec

if TYPE_CHECKING:
    from outbox.database import Connection

DEFAULT_MAX_BODY_BYTES = 4 * 1024 * 1024


class SendStatus(enum.StrEnum):
    """What became of a message that was handed over."""

    ACCEPTED = "accepted"  # the broker has it
    REFUSED = "refused"  # this very message can never go
    MISCONFIGURED = "misconfigured"  # topic missing, wrong type, no permission: a person must act
    UNAVAILABLE = "unavailable"  # the broker's trouble, the message is surely not stored
    UNSURE = "unsure"  # may or may not be stored


class EndSemantics(enum.StrEnum):
    """What a broker does with a second end of one half message. Source: docs/guarantees.md."""

    IDEMPOTENT = "idempotent"  # BI: the first end wins, is remembered and returned
    FORGETFUL = "forgetful"  # BF: the first end wins, a later one hears NOT_FOUND
    DUPLICATING = "duplicating"  # BD: a second COMMIT makes a second copy
    STATELESS = "stateless"  # BS: every COMMIT makes a copy, also after ROLLBACK or a discard


class Ended(enum.StrEnum):
    """How a half message stands after an end."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"
    DISCARDED = "discarded"
    NOT_FOUND = "not_found"


@dataclass(frozen=True, slots=True)
class Outgoing:
    """
    A message on its way to a broker.

    Args:
        token: text of the token; only on half messages.
        deliver_at: not before this time; only on topics of type delay.
        half_id: the half message's id where `Broker.new_half_id` has given it one; else the broker does as it stores it.
    """

    message_id: str
    topic: str
    body: bytes
    key: str = ""
    tag: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    token: str = ""
    deliver_at: datetime | None = None
    half_id: str = ""


@dataclass(frozen=True, slots=True)
class HalfRef:
    """What finds a half message at its broker again."""

    topic: str
    half_id: str
    message_id: str


@dataclass(frozen=True, slots=True)
class SendResult:
    """
    What became of one message.

    Args:
        half_id: the broker's id of the half message, after `send_halves`.
        ended: how the half message stands now, after `end`; it may differ from what was asked.
        reason: for every status but ACCEPTED, what an operator should read.
    """

    status: SendStatus
    half_id: str = ""
    ended: Ended | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Delivery:
    """
    A message handed to a consumer group.

    Args:
        receipt: names this very delivery to the broker; another delivery of the same message has another one.
        attempt: how many times the group has been handed it, this time included.
        stored_at: when the broker made it visible.
        queue, pos: where it lies, in the broker's words; another copy of the message lies elsewhere. None: it does not say.
    """

    group: str
    topic: str
    message_id: str
    body: bytes
    receipt: str
    key: str = ""
    tag: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    attempt: int = 1
    stored_at: datetime | None = None
    queue: str = ""
    pos: int | None = None


@dataclass(frozen=True, slots=True)
class StoredCopy:
    """
    A message as its broker stores it.

    Args:
        state: half, visible, delayed, rolled_back, discarded or dead_letter.
        asked: how often its producers were asked about it, as a half message.
        ended_at: when it ended, as a half message.
    """

    message_id: str
    topic: str
    state: str
    half_id: str = ""
    stored_at: datetime | None = None
    asked: int = 0
    ended_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class DeadLetterCount:
    """Dead letters of a group in a topic, which the broker keeps."""

    consumer_group: str
    topic: str
    letters: int


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """
    What a broker keeps in a database, and an operator should know of.

    Args:
        parked: topic -> half messages that the broker has stopped asking about.
    """

    parked: dict[str, int] = field(default_factory=dict)
    dead_letters: list[DeadLetterCount] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that a group gave up. `id` names it for `replay`."""

    id: str
    group: str
    topic: str
    message_id: str
    reason: str
    attempt: int
    died_at: datetime


@dataclass(frozen=True, slots=True)
class Problem:
    """What `check()` found wrong with a broker's options or topics."""

    text: str
    hint: str
    is_error: bool = True


class Broker(abc.ABC):
    """
    Carries messages from relays to consumer groups.

    Create one after a fork only, in the process that uses it, and use it in one thread at a time.

    Args:
        alias: the broker's name in `OUTBOX["BROKERS"]`.
        options: its OPTIONS, as written there.
        topics: the topics that settings give to it.
    """

    app: ClassVar[str] = ""  # the Django app that has the broker's tables; a system check asks for it in INSTALLED_APPS
    supports_half_messages: ClassVar[bool] = False
    end_semantics: EndSemantics = EndSemantics.STATELESS
    supports_order: ClassVar[bool] = False
    supports_delay: ClassVar[bool] = False
    supports_tags: ClassVar[bool] = False
    supports_replay: ClassVar[bool] = False  # dead letters can be listed, delivered again and discarded
    deduplicates_sends: ClassVar[bool] = False  # what it has is not stored again; a group gets it again by deliver_again()
    needs_check_loop: ClassVar[bool] = False  # True: a host of ours must call check_halves() now and then
    asks_producers: ClassVar[bool] = False  # True: the server asks by itself whoever listens()
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_delay: timedelta = timedelta(days=365)  # `Outgoing.deliver_at` lies no further ahead; the outbox keeps it till then

    # Of brokers whose ends are not idempotent. A COMMIT later than this after the half message was stored could meet a
    # check of the broker's, and be a second one; None: none can.
    commit_window: timedelta | None = None
    # From this age on the broker asks no more about a half message; it ended, or it is lost.
    check_horizon: timedelta = timedelta(minutes=10)

    def __init__(self, alias: str, options: Mapping[str, Any], topics: Sequence[TopicSpec]) -> None:
        self.alias = alias
        self.options = options
        self.topics = {topic.name: topic for topic in topics}

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> list[Problem]:
        """Say what is wrong with the OPTIONS, without a connection."""
        return []

    @classmethod
    def max_send_duration(cls, options: Mapping[str, Any]) -> timedelta:
        """Say how long a send of one batch may take when each request waits as long as it may. A lease must outlast it."""
        return timedelta()

    @classmethod
    def max_check_back_age(cls, options: Mapping[str, Any]) -> timedelta:
        """Say up to which age a half message may be asked about. What its answer stands on must live longer."""
        return cls.check_horizon

    def check(self) -> list[Problem]:
        """Say what is wrong with the options, and with the topics as the running broker knows them."""
        return self.check_options(self.options)

    @classmethod
    def stored_in(cls, options: Mapping[str, Any]) -> str | None:
        """Return the alias of the database in whose tables the broker keeps its messages; None: it has a server."""
        return None

    @classmethod
    def read_status(cls, options: Mapping[str, Any], database: str, connection: Connection) -> BrokerStatus:
        """Return what an operator should know of what the broker keeps in a database, read over a connection to it."""
        return BrokerStatus()

    @classmethod
    def read_copies(cls, options: Mapping[str, Any], message_id: str, half_ids: Sequence[str]) -> list[StoredCopy]:
        """Return what the broker keeps of a message in a database, over Django's connection to that; `find` asks a server."""
        return []

    @abc.abstractmethod
    def send(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        """Send whole messages (one-phase) and wait for each answer."""

    def send_halves(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        """Store half messages, hidden from consumers until they are ended. One physical send each, never repeated."""
        raise UnsupportedByBroker(f"{type(self).__name__} has no half messages. Ask supports_half_messages before.")

    def new_half_id(self, message_id: str) -> str:
        """
        Give an id to a half message before it is sent, for `Outgoing.half_id`; each call gives another.

        Raises:
            BrokerUnavailable: the broker is out of reach.
        """
        raise UnsupportedByBroker(f"{type(self).__name__} has no half messages. Ask supports_half_messages before.")

    def end(self, halves: Sequence[HalfRef], resolution: Resolution) -> list[SendResult]:
        """Commit or roll back half messages; `SendResult.ended` says how each stands now."""
        raise UnsupportedByBroker(f"{type(self).__name__} has no half messages. Ask supports_half_messages before.")

    def check_halves(self, ask: Callable[[Half], Resolution], *, limit: int = 100) -> int:
        """Ask about half messages that are due, end them as answered; give how many were asked about."""
        raise UnsupportedByBroker(f"{type(self).__name__} asks by itself. Look at needs_check_loop before.")

    def listen(self, ask: Callable[[Half], Resolution]) -> None:
        """Have `ask` called, in threads of the broker's own, when the server asks about a half message, until close()."""
        raise UnsupportedByBroker(f"{type(self).__name__} asks nobody by itself. Look at asks_producers before.")

    @abc.abstractmethod
    def receive(
        self,
        group: str,
        topics: Mapping[str, frozenset[str] | None],
        *,
        limit: int,
        invisible_for: timedelta,
        wait: timedelta,
    ) -> list[Delivery]:
        """
        Take messages for a consumer group; they stay invisible to its other members for that long.

        Args:
            topics: topic -> the tags wanted, None for all. The same for every member of the group.
            limit: at most this many messages (1 or more).
            wait: return an empty list after this time when nothing comes.
        """

    @abc.abstractmethod
    def ack(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """Say that these are done. False: the delivery's time was over, the message may be handed out again."""

    @abc.abstractmethod
    def retry(self, delivery: Delivery, after: timedelta) -> bool:
        """Have the message delivered to the group again after that time. False as for `ack`."""

    @abc.abstractmethod
    def dead_letter(self, delivery: Delivery, reason: str) -> bool:
        """Put the message aside for a person; the group goes on with the next. False as for `ack`."""

    def dead_letters(self, group: str, *, limit: int = 100) -> list[DeadLetter]:
        """List what a group gave up, oldest first."""
        raise UnsupportedByBroker(f"{type(self).__name__} does not list dead letters. Ask supports_replay before.")

    def replay(self, group: str, letters: Sequence[str]) -> int:
        """Have dead letters (by `DeadLetter.id`) delivered to their group again, attempts from 1; give how many were."""
        raise UnsupportedByBroker(f"{type(self).__name__} does not replay dead letters. Ask supports_replay before.")

    def discard(self, group: str, letters: Sequence[str]) -> int:
        """Let dead letters (by `DeadLetter.id`) go for good; give how many were still there."""
        raise UnsupportedByBroker(f"{type(self).__name__} does not discard dead letters. Ask supports_replay before.")

    def deliver_again(self, group: str, message_ids: Sequence[str]) -> set[str]:
        """Have messages that the group has read delivered to it again; give the ids of those that will be."""
        raise UnsupportedByBroker(f"{type(self).__name__} delivers what is sent again. Ask deduplicates_sends before.")

    @abc.abstractmethod
    def backlog(self, group: str) -> dict[str, int]:
        """Count, per topic, the messages that wait for a group, those being handled included."""

    @abc.abstractmethod
    def find(self, message_id: str) -> list[StoredCopy]:
        """Look a message up, in each form the broker holds it. A server may know of one a moment after it took it."""

    def prune(self) -> int:
        """Drop some of what retention no longer keeps; give how many rows, 0 when nothing is left."""
        return 0

    def close(self) -> None:  # noqa: B027  (nothing to let go of is a good answer)
        """Let go of connections. The broker is not used after it."""


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
    "Outgoing",
    "Problem",
    "SendResult",
    "SendStatus",
    "StoredCopy",
    "TopicSpec",
]
