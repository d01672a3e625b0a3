"""
What travels: message types, the names of its headers, the token of a half message, the receipt of a publish.

Nothing here touches a database or a broker.
"""

from __future__ import annotations

import enum
import json
import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, ClassVar, Self, dataclass_transform
from uuid import UUID

import msgspec

Upgrade = Callable[[dict[str, Any]], dict[str, Any]]

_prepared: set[type[msgspec.Struct]] = set()
_preparing = threading.Lock()


def prepare(kind: type[msgspec.Struct]) -> None:
    """
    Have msgspec study a type, before it decodes or converts to it.

    It does so at the first use, and has other threads meanwhile use what is half done: the process crashes (seen with 0.22).
    """
    if kind not in _prepared:
        with _preparing:
            msgspec.json.Decoder(kind)
        _prepared.add(kind)


class Resolution(enum.StrEnum):
    """How a half message ends. UNKNOWN means: ask again later."""

    COMMIT = "COMMIT"
    ROLLBACK = "ROLLBACK"
    UNKNOWN = "UNKNOWN"


COMMIT = Resolution.COMMIT
ROLLBACK = Resolution.ROLLBACK
UNKNOWN = Resolution.UNKNOWN


class TopicType(enum.StrEnum):
    """What a topic carries; exclusive, as in RocketMQ. Source: apache/rocketmq-apis definition.proto, MessageType."""

    NORMAL = "normal"
    TRANSACTION = "transaction"
    FIFO = "fifo"
    DELAY = "delay"


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """
    A topic as a broker creates it.

    Args:
        queues: how many messages without a key may travel side by side.
        retention: how long the broker keeps its messages.
        remembered: how long consumers remember which of its messages they have handled.
    """

    name: str
    type: TopicType
    queues: int = 4
    retention: timedelta = timedelta(days=7)
    remembered: timedelta = timedelta(days=7)


class Header:
    """
    Names of the headers that the outbox writes.

    Source: CloudEvents 1.0, HTTP binary mode (`ce-` before the attribute's name); those behind SPEC_VERSION are
    extension attributes. A raw message has no TYPE and is no CloudEvent, so it has no SPEC_VERSION either. A user's own
    header is called anything that does not begin with `ce-`, but for `content-type`.
    """

    ID = "ce-id"
    SOURCE = "ce-source"
    TYPE = "ce-type"
    TIME = "ce-time"
    SUBJECT = "ce-subject"
    SPEC_VERSION = "ce-specversion"
    VERSION = "ce-typeversion"
    TAG = "ce-tag"
    ABOUT = "ce-about"
    LANE = "ce-lane"
    NUMBER = "ce-number"
    TOKEN = "ce-token"
    DELIVER_AT = "ce-deliverat"  # ISO 8601; on topics of type delay: the relay hands the time to the broker
    CORRELATION_ID = "ce-correlationid"
    CAUSATION_ID = "ce-causationid"
    CONTENT_TYPE = "content-type"
    TRACEPARENT = "traceparent"  # W3C Trace Context; the caller's own, or that of the message being handled

    RESERVED_PREFIX = "ce-"


@dataclass(frozen=True, slots=True)
class MessageOptions:
    """What `class Meta` of a message type says."""

    topic: str = ""
    key: str = ""
    tag: str = ""
    type: str = ""
    version: int = 1
    mask: tuple[str, ...] = ()


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class _MessageType(msgspec.StructMeta):
    """Tells type checkers that subclasses of a message type are frozen, too, as msgspec has it."""


class Message(msgspec.Struct, frozen=True, metaclass=_MessageType):
    """
    Base of message types: frozen, typed, validated when published and when received.

    `class Meta` may name `topic` (needed to publish), `key` (a field: search, order, idempotency scope), `tag`,
    `version` (a whole number, raised when the shape changes), `type` (the name on the wire, by default the class's) and
    `mask` (fields that the admin shows only to those who may see them).
    """

    _meta: ClassVar[MessageOptions] = MessageOptions()
    _upgrades: ClassVar[dict[int, Upgrade]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._meta = _read_meta(cls)
        cls._upgrades = {}
        _register(cls)

    @classmethod
    def upgrade_from(cls, version: int) -> Callable[[Upgrade], Upgrade]:
        """Take the decorated function as the step that turns a body of `version` (a dict) into one of `version + 1`."""
        if not _is_version(version):
            raise TypeError(f"@{cls.__name__}.upgrade_from takes the older version, a whole number, not {version!r}.")

        def remember(step: Upgrade) -> Upgrade:
            cls._upgrades[version] = step
            return step

        return remember

    @classmethod
    def from_body(cls, body: bytes, version: int | None = None) -> Self:
        """
        Read a message from its JSON body, through the upgrades that lead from `version` to today's.

        Raises:
            msgspec.ValidationError: the body does not fit the type; the text names the field.
            msgspec.DecodeError: the body is not JSON.
        """
        prepare(cls)
        if version is None or version >= cls._meta.version:
            return msgspec.json.decode(body, type=cls)
        content = msgspec.json.decode(body)
        for step in range(version, cls._meta.version):
            if step not in cls._upgrades:
                raise msgspec.ValidationError(
                    f"{cls._meta.type} has no upgrade from version {step}. Add @{cls.__name__}.upgrade_from({step})."
                )
            content = cls._upgrades[step](content)
        return msgspec.convert(content, cls)


registered: dict[str, type[Message]] = {}


def message_type(name: str) -> type[Message] | None:
    """Return the message type of that name on the wire, or None where no module defines it."""
    return registered.get(name)


def message_types() -> Mapping[str, type[Message]]:
    """Return all message types by their name on the wire."""
    return dict(registered)


def _read_meta(cls: type[Message]) -> MessageOptions:
    meta = cls.__dict__.get("Meta")
    given = {name: value for name, value in vars(meta).items() if not name.startswith("__")} if meta else {}
    known = set(MessageOptions.__dataclass_fields__)
    if unknown := sorted(set(given) - known):
        raise TypeError(f"{cls.__name__}.Meta has unknown options {unknown}. Known are {sorted(known)}.")
    if not isinstance(given.get("mask", ()), list | tuple):
        raise TypeError(f'{cls.__name__}.Meta.mask is a list of fields, such as ["customer"], not {given["mask"]!r}.')
    for name in ("topic", "key", "tag", "type"):
        if not isinstance(given.get(name, ""), str):
            raise TypeError(f"{cls.__name__}.Meta.{name} is a text, not {given[name]!r}.")
    version = given.get("version", 1)
    if not _is_version(version):
        raise TypeError(f"{cls.__name__}.Meta.version is a whole number, not {version!r}.")
    return MessageOptions(**{"type": cls.__name__, **given, "mask": tuple(given.get("mask", ()))})


def _is_version(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0


def _register(cls: type[Message]) -> None:
    name = cls._meta.type
    other = registered.get(name)
    if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
        raise TypeError(
            f"Message type {name!r} is defined twice: {other.__module__}.{other.__qualname__} and "
            f"{cls.__module__}.{cls.__qualname__}. Give one of them another `type` in its class Meta."
        )
    registered[name] = cls


@dataclass(frozen=True, slots=True)
class Receipt:
    """What `publish()` returns. `is_duplicate`: the dedupe key was known, this is the first message's receipt."""

    message_id: UUID
    topic: str
    key: str = ""
    is_duplicate: bool = False


@dataclass(frozen=True, slots=True)
class Cause:
    """The message being handled; what its handler publishes names it as the cause, and goes on with its trace."""

    message_id: str
    correlation_id: str
    traceparent: str = ""


current_cause: ContextVar[Cause | None] = ContextVar("outbox_current_cause", default=None)


@dataclass(frozen=True, slots=True)
class Token:
    """
    What a half message carries to be found again. One per physical send.

    Args:
        source: the stable id of the database that holds the batch.
        batch: 0 where the publishing transaction itself sent the half message (half first): nobody could see its batch
            yet, so the message's id finds it.
        position: the message's place in its batch, from 1.
    """

    source: str
    batch: int
    attempt: int
    position: int

    @property
    def is_half_first(self) -> bool:
        """Whether the publishing transaction sent the half message, not a relay."""
        return self.batch == 0

    def __str__(self) -> str:
        return f"{self.source}:{self.batch}:{self.attempt}:{self.position}"

    @classmethod
    def parse(cls, text: str) -> Token:
        """
        Read a token's text form.

        Raises:
            ValueError: the text is not a token.
        """
        source, batch, attempt, position = text.rsplit(":", 3)
        if not source:
            raise ValueError(f"Token {text!r} names no source.")
        return cls(source, int(batch), int(attempt), int(position))


@dataclass(frozen=True, slots=True)
class Half:
    """
    A half message as its broker asks about it.

    Args:
        token: text form of a `Token`; empty when another producer sent the half.
        asked: how many times the broker has asked, this time included.
        born_at: when the broker stored the half.
    """

    topic: str
    message_id: str
    half_id: str
    token: str = ""
    asked: int = 1
    born_at: datetime | None = None
    key: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


def read_headers(text: str) -> dict[str, str]:
    """Return the headers of a message row; none where they are broken."""
    try:
        headers = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return {str(name): str(value) for name, value in headers.items()} if isinstance(headers, dict) else {}
