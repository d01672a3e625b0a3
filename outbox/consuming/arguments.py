"""The arguments of `@consumer`: their types, for type checkers, and their validation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any, Literal, Protocol, TypedDict, TypeVar, get_args, overload

from outbox.consuming.retry import Retry
from outbox.errors import ConfigurationError
from outbox.message import Message

Handler = Callable[[Any, Any], object]  # message and context; two lists with batch_size
OnDead = Literal["block", "skip"]
NOT_A_MESSAGE = {"self", "cls", "context", "contexts"}  # names that say that the arguments were taken for others
MOST_AT_ONCE = 500  # each message holds a lock until its transaction ends: locks.md

M = TypeVar("M", contravariant=True)
C = TypeVar("C", contravariant=True)
T = TypeVar("T")
U = TypeVar("U")
Result = TypeVar("Result")


class Options(TypedDict, total=False):
    """The options that do not change the handler's signature."""

    retry: Retry
    ordered: bool
    on_dead: OnDead
    dedupe: Callable[[Any], object] | None
    tags: Collection[str] | None
    using: str
    time_limit: timedelta | None


class HandlerClass(Protocol[M, C]):
    """A class used as a handler."""

    def handle(self, message: M, context: C, /) -> object: ...


class Decorator(Protocol[T, U]):
    """Decorates a callable of a T (message, or list of messages) and a U (context, or list of contexts)."""

    @overload
    def __call__(self, target: type[HandlerClass[T, U]], /) -> Any: ...
    @overload
    def __call__(self, target: Callable[[T, U], Result], /) -> Callable[[T, U], Result]: ...


def check_limits(time_limit: timedelta | None, batch_size: int | None, *, ordered: bool) -> None:
    if time_limit is not None and not (isinstance(time_limit, timedelta) and time_limit > timedelta(0)):
        raise ConfigurationError(f"time_limit must be a timedelta above zero, not {time_limit!r}; omit it for none.")
    if batch_size is not None and not (isinstance(batch_size, int) and 2 <= batch_size <= MOST_AT_ONCE):
        raise ConfigurationError(f"batch_size must be 2 to {MOST_AT_ONCE}, not {batch_size!r}; omit it for one at a time.")
    if batch_size is not None and ordered:
        raise ConfigurationError("ordered=True delivers one message of a key at a time; omit batch_size.")


def check_policies(retry: object, dedupe: object) -> None:
    if not isinstance(retry, Retry):
        raise ConfigurationError(f"retry must be a policy, such as Retry(limit=3), not {retry!r}.")
    if dedupe is not None and not callable(dedupe):
        raise ConfigurationError(f"dedupe must be a function of the message, such as lambda message: message.id, not {dedupe!r}.")


def check_arguments(types: tuple[Any, ...], group: str, topic: str, tags: Collection[str] | None, on_dead: str) -> None:
    for type_ in types:
        if not (isinstance(type_, type) and issubclass(type_, Message)):
            raise ConfigurationError(f"@consumer takes message types, not {type_!r}: @consumer(OrderPlaced, group=…).")
        if not type_._meta.topic:
            raise ConfigurationError(f"{type_.__name__} has no topic. Add `topic` to its class Meta.")
    if not (group and isinstance(group, str)):
        raise ConfigurationError('@consumer needs the name of a group: @consumer(OrderPlaced, group="cart").')
    if bool(types) == bool(topic):
        raise ConfigurationError(
            'A handler takes message types or a plain topic: @consumer(OrderPlaced, group="cart") or '
            '@consumer(topic="orders", group="cart").'
        )
    if on_dead not in get_args(OnDead):
        raise ConfigurationError(f'on_dead must be "block" or "skip", not {on_dead!r}.')
    if isinstance(tags, str) or (tags is not None and not tags):
        raise ConfigurationError(f'tags must be a set of strings, such as {{"placed"}}, not {tags!r}; omit it for all tags.')


def handler_of(target: Callable[..., Any]) -> Handler:
    handler = target
    if isinstance(target, type):
        handler = getattr(target(), "handle", None)  # type: ignore[assignment]
    shape = "handle(self, message, context)" if isinstance(target, type) else "handler(message, context)"
    try:
        signature = inspect.signature(handler)
        signature.bind("message", "context")
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{name_of(target)} cannot be called as {shape}: {error}.") from error
    first = next(iter(signature.parameters), "")
    if first in NOT_A_MESSAGE:
        raise ConfigurationError(
            f"The first argument of {name_of(target)} is the message, but is named {first!r}. Write {shape}; to use a method, "
            "decorate its class."
        )
    return handler


def name_of(target: Callable[..., Any]) -> str:
    return f"{target.__module__}.{getattr(target, '__qualname__', type(target).__qualname__)}"
