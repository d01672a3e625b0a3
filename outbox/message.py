"""
Messages: their types, the names of their headers, the token of a half message, and the receipt that `publish()` returns.

Nothing in this module uses a database or a broker. A half message is stored by its broker and hidden from consumers until it is
committed or rolled back.
"""

from __future__ import annotations

import enum
import inspect
import itertools
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from datetime import datetime, timedelta
from typing import Any, ClassVar, Self, dataclass_transform
from uuid import UUID

import msgspec

Upgrade = Callable[[dict[str, Any]], dict[str, Any]]

_prepared: set[type[msgspec.Struct]] = set()  # types whose decoder was built
_preparing = threading.Lock()

# msgspec's error about a required field that comes after one with a default.
_AFTER_OPTIONAL = re.compile(r"Required field '(\w+)' cannot follow optional fields")


def prepare(kind: type[msgspec.Struct]) -> None:
    """
    Build msgspec's decoder of a type under a lock, before the type is first used.

    Otherwise msgspec builds it at the first use, and another thread that uses the type meanwhile crashes the process (seen with
    msgspec 0.22).
    """
    if kind not in _prepared:
        with _preparing:
            msgspec.json.Decoder(kind)
        _prepared.add(kind)


class Resolution(enum.StrEnum):
    """The resolution of a half message. UNKNOWN means: ask again later."""

    COMMIT = "COMMIT"
    ROLLBACK = "ROLLBACK"
    UNKNOWN = "UNKNOWN"


COMMIT = Resolution.COMMIT
ROLLBACK = Resolution.ROLLBACK
UNKNOWN = Resolution.UNKNOWN


class TopicType(enum.StrEnum):
    """
    The kind of messages that a topic carries. A topic has exactly one type, as in RocketMQ.

    Source: apache/rocketmq-apis definition.proto, MessageType.
    """

    NORMAL = "normal"
    TRANSACTION = "transaction"
    FIFO = "fifo"
    DELAY = "delay"


class TopicSpec(msgspec.Struct, frozen=True):
    """
    A topic as a broker creates it.

    Args:
        queues: the number of messages without a key that can be in flight to consumers at the same time.
        retention: how long the broker keeps messages.
        remembered: how long consumers remember which messages they have handled.
        groups: the consumer groups that subscribe to the topic, as far as this process has their code.
    """

    name: str
    type: TopicType
    queues: int = 4
    retention: timedelta = timedelta(days=7)
    remembered: timedelta = timedelta(days=7)
    groups: frozenset[str] = frozenset()


class Header:
    """
    Names of the headers that the outbox writes.

    Source: CloudEvents 1.0, HTTP binary mode (`ce-` before the attribute's name); the `ce-` headers below SPEC_VERSION are
    extension attributes. A raw message has no TYPE, so it is not a CloudEvent and has no SPEC_VERSION. Users' own headers may
    have any other name that does not begin with `ce-`.
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
    DELIVER_AT = "ce-deliverat"  # ISO 8601; on topics of type delay, the relay passes this time to the broker
    CORRELATION_ID = "ce-correlationid"
    CAUSATION_ID = "ce-causationid"
    CONTENT_TYPE = "content-type"
    TRACEPARENT = "traceparent"  # W3C Trace Context; the caller's own, or that of the message being handled
    UNREADABLE = "outbox-unreadable"  # why the headers or body of another program's message cannot be read; it then has no ID

    RESERVED_PREFIX = "ce-"


class MessageOptions(msgspec.Struct, frozen=True):
    """The options in `class Meta` of a message type. `abstract`: the class is only a base of message types."""

    abstract: bool = False
    topic: str = ""
    key: str = ""
    tag: str = ""
    type: str = ""
    version: int = 1
    mask: tuple[str, ...] = ()


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class _MessageType(msgspec.StructMeta):
    """
    Metaclass of message types. Its errors name the class and its fields, which msgspec's errors do not.

    It also makes type checkers treat subclasses as frozen, as msgspec does.
    """

    _meta: MessageOptions

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> _MessageType:
        try:
            new_class = super().__new__(mcls, name, bases, namespace, **options)
        except TypeError as error:
            if unrelated := _unrelated_bases(bases):
                raise TypeError(
                    f"{name} has two bases with fields, {unrelated[0].__name__} and {unrelated[1].__name__}, which Python cannot "
                    f"join. Let one of them inherit from the other: class {unrelated[0].__name__}({unrelated[1].__name__})."
                ) from error
            for base in bases:
                if not issubclass(base, msgspec.Struct) and "__init__" in vars(base):
                    raise TypeError(
                        f"{name} cannot inherit from {base.__name__}, which has an __init__ of its own. {_suggest_base(base)}"
                    ) from error
            if match := _AFTER_OPTIONAL.match(str(error)):
                raise TypeError(
                    f"{name}.{match[1]} is required, and a field before it has a default. Move it before that field, give it a "
                    f"default, or let all fields be passed by name: class {name}({', '.join(base.__name__ for base in bases)}, "
                    "kw_only=True)."
                ) from error
            raise
        _require_fields_of_mixins(new_class)
        if not new_class._meta.abstract:
            _register(new_class)  # type: ignore[arg-type]
        return new_class

    def __call__(cls, *args: Any, **values: Any) -> Any:
        if cls._meta.abstract:
            raise TypeError(f"{cls.__name__} is abstract: it is only a base of message types. Use one of those types.")
        try:
            return super().__call__(*args, **values)
        except TypeError as error:
            if (problem := _problem_of_fields(cls, len(args), values)) and error.__traceback__.tb_next is None:  # type: ignore[union-attr]
                raise TypeError(problem) from error
            raise


def _unrelated_bases(bases: tuple[type, ...]) -> list[type]:
    """Return the first two bases with fields of which neither inherits from the other; [] if there are none."""
    with_fields = [base for base in bases if getattr(base, "__struct_fields__", ())]
    for first, other in itertools.combinations(with_fields, 2):
        if not issubclass(first, other) and not issubclass(other, first):
            return [first, other]
    return []


def _require_fields_of_mixins(kind: type) -> None:
    """Raise if a base that is not a Struct has an annotation that looks like a field, because msgspec ignores it."""
    for base in kind.__mro__:
        if issubclass(base, msgspec.Struct):
            continue
        for name, annotation in inspect.get_annotations(base).items():
            if "ClassVar" not in str(annotation) and name not in kind.__struct_fields__:  # type: ignore[attr-defined]
                raise TypeError(
                    f"{base.__name__}.{name} would not be a field of {kind.__name__}, since {base.__name__} is not a message. "
                    f"{_suggest_base(base)}"
                )


def _suggest_base(base: type) -> str:
    return f"Write class {base.__name__}(Message), with `abstract = True` in its class Meta."


def _problem_of_fields(kind: type, given: int, values: Mapping[str, object]) -> str:
    """
    Return a text about the missing, unknown or surplus fields in a call of a message type; "" if there are none.

    Args:
        given: the number of positional arguments.
        values: the keyword arguments.
    """
    fields = msgspec.structs.fields(kind)
    names = [field.name for field in fields]
    unknown = [name for name in values if name not in names]
    missing = [field.name for field in fields[given:] if field.required and field.name not in values]
    parts = [f"has no field {_quoted(unknown)}"] if unknown else []
    if missing:
        parts.append(f"needs {_quoted(missing)}")
    if given > len(names):
        parts.append(f"was given {given} values")
    return f"{kind.__name__} {' and '.join(parts)}. Its fields are: {', '.join(names) or 'none'}." if parts else ""


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


class Message(msgspec.Struct, frozen=True, metaclass=_MessageType):
    """
    Base of message types: frozen, typed, validated when published and when received.

    `class Meta` may set `topic` (required to publish), `key` (the name of a field: for search, order and the scope of
    idempotency), `tag`, `version` (an integer, increased when the fields change), `type` (the name on the wire, by default
    the name of the class) and `mask` (fields that the admin shows only to users who have the permission).

    A type without `class Meta` has the options of its base, and `class Meta(Base.Meta)` changes some of them. With
    `abstract = True`, a class is only a base: its subclasses have its fields and options. `type` and `abstract` are never
    inherited.
    """

    _meta: ClassVar[MessageOptions] = MessageOptions(abstract=True)
    _upgrades: ClassVar[dict[int, Upgrade]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._meta = _read_meta(cls)
        cls._upgrades = {}

    def __repr__(self) -> str:
        """Return the fields with masked values replaced by `***`, because errors and logs show this text."""
        shown = ((name, "***" if name in self._meta.mask else repr(getattr(self, name))) for name in self.__struct_fields__)
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in shown)})"

    @classmethod
    def upgrade_from(cls, version: int) -> Callable[[Upgrade], Upgrade]:
        """Register the decorated function, which turns the body (a dict) of `version` into the body of `version + 1`."""
        if not _is_version(version):
            raise TypeError(f"@{cls.__name__}.upgrade_from takes the older version as an integer, not {version!r}.")
        if cls._meta.abstract:
            raise TypeError(f"{cls.__name__} is abstract, so no body is upgraded to it. Decorate the upgrades of its types.")

        def register(upgrade: Upgrade) -> Upgrade:
            cls._upgrades[version] = upgrade
            return upgrade

        return register

    @classmethod
    def from_body(cls, body: bytes, version: int | None = None) -> Self:
        """
        Return the message in a JSON body, upgraded step by step from `version` to the current one.

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
                    f"{cls._meta.type} has no upgrade from version {step}, @{cls.__name__}.upgrade_from({step})"
                )
            content = cls._upgrades[step](content)
        return msgspec.convert(content, cls)


registered: dict[str, type[Message]] = {}


def message_type(name: str) -> type[Message] | None:
    """Return the message type of that name on the wire, or None if no imported module defines one."""
    return registered.get(name)


def message_types() -> Mapping[str, type[Message]]:
    """Return all message types by their name on the wire."""
    return dict(registered)


def _read_meta(cls: type[Message]) -> MessageOptions:
    options: dict[str, Any] = {}
    meta = getattr(cls, "Meta", None)
    for parent in reversed(meta.__mro__ if meta else ()):
        options |= {name: value for name, value in vars(parent).items() if not name.startswith("__")}
    own_options = vars(cls.__dict__["Meta"]) if "Meta" in cls.__dict__ else {}
    for name in ("abstract", "type"):  # these two options are not inherited
        options.pop(name, None)
        options |= {name: own_options[name]} if name in own_options else {}
    known_names = set(MessageOptions.__struct_fields__)
    if unknown := sorted(set(options) - known_names):
        raise TypeError(f"{cls.__name__}.Meta has unknown options {unknown}. Choices are: {sorted(known_names)}.")
    if not isinstance(options.get("mask", ()), list | tuple):
        raise TypeError(f'{cls.__name__}.Meta.mask must be a list of fields, such as ["customer"], not {options["mask"]!r}.')
    for name in ("topic", "key", "tag", "type"):
        if not isinstance(options.get(name, ""), str):
            raise TypeError(f"{cls.__name__}.Meta.{name} must be a string, not {options[name]!r}.")
    if not isinstance(is_abstract := options.get("abstract", False), bool):
        raise TypeError(f"{cls.__name__}.Meta.abstract must be True or False, not {is_abstract!r}.")
    if is_abstract and "type" in options:
        raise TypeError(f"{cls.__name__} is abstract, so no message has its Meta.type {options['type']!r}. Remove one of them.")
    version = options.get("version", 1)
    if not _is_version(version):
        raise TypeError(f"{cls.__name__}.Meta.version must be an integer, 0 or greater, not {version!r}.")
    return MessageOptions(**{"type": "" if is_abstract else cls.__name__, **options, "mask": tuple(options.get("mask", ()))})


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


class Receipt(msgspec.Struct, frozen=True):
    """The result of `publish()`. `is_duplicate`: the idempotency key was used before, and this is the first message's receipt."""

    message_id: UUID
    topic: str
    key: str = ""
    is_duplicate: bool = False


class Cause(msgspec.Struct, frozen=True):
    """The message being handled. Messages that its handler publishes name it as their cause and continue its trace."""

    message_id: str
    correlation_id: str
    traceparent: str = ""


current_cause: ContextVar[Cause | None] = ContextVar("outbox_current_cause", default=None)


class Token(msgspec.Struct, frozen=True):
    """
    The identity of a half message, carried in its headers. Each send has a token of its own.

    Args:
        source: the stable id of the database that holds the batch.
        batch: the id of the batch. It is 0 if the publishing transaction itself sent the half message (half first): then the
            batch is not visible to other transactions yet, so it is found by the message id.
        attempt: the number of the batch's claim.
        position: the message's position in its batch, from 1.
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
        Return the token with this text form.

        Raises:
            ValueError: the text is not a token.
        """
        source, batch, attempt, position = text.rsplit(":", 3)
        if not source:
            raise ValueError(f"Token {text!r} names no source.")
        return cls(source, int(batch), int(attempt), int(position))


class Half(msgspec.Struct, frozen=True):
    """
    A half message about which its broker asks in a check-back.

    Args:
        half_id: the broker's id of the half message.
        token: text form of a `Token`; empty if a producer other than the outbox sent the half message.
        asked: how many times the broker has asked, including this time.
        born_at: when the broker stored the half message.
    """

    topic: str
    message_id: str
    half_id: str
    token: str = ""
    asked: int = 1
    born_at: datetime | None = None
    key: str = ""
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    body: bytes = b""


def read_headers(text: str) -> dict[str, str]:
    """Return the headers of a message row; an empty dict if they cannot be read."""
    try:
        headers = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return {str(name): str(value) for name, value in headers.items()} if isinstance(headers, dict) else {}
