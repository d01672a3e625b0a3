"""
Register handlers of messages: `@consumer` with its `RetryPolicy`, and the consumer groups that its arguments name.

A handler may be a coroutine function. As with any other handler, the worker's thread waits until it has ended.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import threading
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, Literal, Protocol, TypedDict, TypeVar, Unpack, get_args, overload

import msgspec
from asgiref.sync import async_to_sync, iscoroutinefunction
from django.db import DEFAULT_DB_ALIAS

from outbox import conf
from outbox.conf import RETRY_DELAYS
from outbox.consuming.delivery_info import Context
from outbox.errors import ConfigurationError, TimeLimitExceeded
from outbox.message import Message, TopicType

Handler = Callable[[Any, Any], object]  # takes message and context; with a batch_size, a list of each
OnDead = Literal["block", "skip"]
# Names of a handler's first parameter that show that the function does not expect the message there.
NOT_A_MESSAGE = {"self", "cls", "context", "contexts"}
REMOVED_OPTIONS = {
    "dedupe": "It is called idempotency_key.",
    "ordered": 'Remove the option. A topic keeps order if its TYPE in OUTBOX["TOPICS"] is "fifo".',
}
ANY_TAG = "*"  # the tag in the subscription of a handler that takes all tags
CANCEL_SECONDS = 5.0  # how long a cancelled coroutine may take to end
MAX_BATCH_SIZE = 500  # a transaction holds an advisory lock for each of its messages; see docs/explanation/locks.md

M = TypeVar("M", contravariant=True)
C = TypeVar("C", contravariant=True)
T = TypeVar("T")
U = TypeVar("U")
Result = TypeVar("Result")
Decorated = TypeVar("Decorated", bound=Callable[..., Any])
M1 = TypeVar("M1", bound=Message)
M2 = TypeVar("M2", bound=Message)
M3 = TypeVar("M3", bound=Message)


class Options(TypedDict, total=False):
    """The options that do not change the handler's signature."""

    retry: RetryPolicy
    on_dead: OnDead
    idempotency_key: Callable[[Any], object] | None
    tags: Collection[str] | None
    using: str
    time_limit: timedelta | None


class HandlerClass(Protocol[M, C]):
    """A class used as a handler."""

    def handle(self, message: M, context: C, /) -> object: ...


class PlainHandlerClass(Protocol[M]):
    """A class used as a handler, without the context."""

    def handle(self, message: M, /) -> object: ...


class Decorator(Protocol[T, U]):
    """Decorates a callable that takes a T (message, or list of messages) and optionally a U (context, or list of contexts)."""

    @overload
    def __call__(self, target: type[HandlerClass[T, U]] | type[PlainHandlerClass[T]], /) -> Any: ...
    @overload
    def __call__(self, target: Callable[[T, U], Result], /) -> Callable[[T, U], Result]: ...
    @overload
    def __call__(self, target: Callable[[T], Result], /) -> Callable[[T], Result]: ...


class RetryPolicy(msgspec.Struct, frozen=True):
    """
    How often, and after which delays, a message is retried before it becomes a dead letter.

    Args:
        limit: number of retries after the first failure; 0 for none. Errors of the handler count, deliveries do not:
            docs/explanation/deliveries.md.
        delays: the delays before the first retry, the second, …; the last one is used for all further ones.
        jitter: each delay is randomly longer or shorter by up to this fraction (0 to 1), so that messages that failed together
            are not retried together.
        on: exceptions to retry; any other makes the message a dead letter at once.
    """

    limit: int = 16
    delays: Sequence[timedelta] = RETRY_DELAYS
    jitter: float = 0.1
    on: tuple[type[Exception], ...] = (Exception,)

    def __post_init__(self) -> None:
        if not isinstance(self.limit, int) or self.limit < 0 or not 0 <= self.jitter <= 1:
            raise ConfigurationError(
                f"RetryPolicy(limit={self.limit!r}, jitter={self.jitter}) is not valid: limit must be an integer of at least 0, "
                "jitter a number from 0 to 1."
            )
        if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in self.on):
            raise ConfigurationError(f"RetryPolicy(on={self.on!r}) is not valid: pass exception classes.")
        msgspec.structs.force_setattr(self, "on", tuple(self.on))
        if not self.delays or not all(isinstance(delay, timedelta) and delay >= timedelta(0) for delay in self.delays):
            raise ConfigurationError("RetryPolicy(delays=...) is not valid: pass at least one timedelta, and none below zero.")

    def allows(self, failures: int) -> bool:
        """Return whether a message is retried when its handler has failed this many times (1 or more)."""
        return failures <= self.limit

    def delay(self, failures: int) -> timedelta:
        """Return the delay of the retry after this many failures (1 or more)."""
        base = self.delays[min(failures, len(self.delays)) - 1]
        return base * random.uniform(1 - self.jitter, 1 + self.jitter)  # noqa: S311


class Consumer(msgspec.Struct, frozen=True):
    """
    One handler in one group, for one message type or for a plain topic (messages that have no handler for their type).

    Args:
        name: module and qualified name of the decorated function or class.
        type: the message type; None for a plain topic.
        tags: the handler takes only messages with one of these tags; None for all.
        batch_size: the maximum number of messages that the handler takes at once; None for one after the other.
        is_async: the decorated function is a coroutine function; `handler` is a plain function that runs it.
    """

    name: str
    group: str
    topic: str
    handler: Handler
    type: type[Message] | None
    retry: RetryPolicy
    on_dead: OnDead
    idempotency_key: Callable[[Any], object] | None
    tags: frozenset[str] | None
    using: str
    time_limit: timedelta | None = None
    batch_size: int | None = None
    is_async: bool = False

    @property
    def subject(self) -> str:
        """What it handles: the type's name in the message header, or `plain_subject` of the topic; unique in its group."""
        return self.type._meta.type if self.type else plain_subject(self.topic)

    @property
    def is_ordered(self) -> bool:
        """Whether the handler's topic keeps the messages of a key in order."""
        topic = conf.settings().topics.get(self.topic)
        return topic is not None and topic.type is TopicType.FIFO

    def takes(self, tag: str) -> bool:
        return self.tags is None or tag in self.tags


class Group(msgspec.Struct, frozen=True, dict=True):
    """A consumer group, with its handlers by their `subject`. All handlers of a group use the inbox of the same database."""

    name: str
    consumers: Mapping[str, Consumer] = msgspec.field(default_factory=dict)

    @property
    def using(self) -> str:
        return next(iter(self.consumers.values())).using

    @property
    def brokers(self) -> list[str]:
        """Aliases of the brokers that carry the group's topics."""
        return sorted({conf.topic_settings(topic).broker for topic in self.topics})

    @cached_property
    def topics(self) -> list[str]:
        """The group's topics, sorted."""
        return sorted({registered.topic for registered in self.consumers.values()})

    def topics_of(self, broker: str) -> list[str]:
        """
        Return the topics that a broker carries for the group.

        Raises:
            UnknownTopic: a topic is not in settings.
            ConfigurationError: a handler with a batch_size has an ordered topic, or a broker of the group only sends messages.
        """
        for registered in self.consumers.values():
            if not conf.broker_has(conf.topic_settings(registered.topic).broker, "Receives"):
                raise ConfigurationError(
                    f"{registered.name} handles topic {registered.topic!r}, whose broker only sends messages.",
                    hint="Assign the topic to a broker that can also receive, or remove the handler.",
                )
            if registered.batch_size and registered.is_ordered:
                raise ConfigurationError(
                    f"{registered.name} has a batch_size, but topic {registered.topic!r} is of type fifo, whose messages are "
                    "handled one by one.",
                    hint="Remove batch_size, or give the topic another TYPE.",
                )
        return [topic for topic in self.topics if conf.topic_settings(topic).broker == broker]

    def find(self, topic: str, type_name: str, tag: str) -> Consumer | None:
        """Return the handler of the message's type, otherwise that of its plain topic; None if neither takes the message."""
        for subject in (type_name, plain_subject(topic)):
            registered = self.consumers.get(subject)
            if registered is not None and registered.topic == topic and registered.takes(tag):
                return registered
        return None

    def takes_all_of(self, topic: str) -> bool:
        """Return whether a handler takes the messages of a topic regardless of their type; it may still take only some tags."""
        return plain_subject(topic) in self.consumers


registered: dict[str, Group] = {}  # group's name -> group


def groups() -> Mapping[str, Group]:
    """Return all groups by name."""
    return dict(registered)


def all_consumers() -> list[Consumer]:
    """Return the handlers of all groups."""
    return [consumer for group in registered.values() for consumer in group.consumers.values()]


def groups_of(topic: str) -> list[str]:
    """Return the names of the groups that have a handler for messages of a topic."""
    return [name for name, group in registered.items() if topic in group.topics]


conf.take_groups_from(groups_of)


def group(name: str) -> Group:
    """
    Return a group.

    Raises:
        ConfigurationError: this process has no handler in that group.
    """
    if name not in registered:
        raise ConfigurationError(f"No @consumer is in the group {name!r}.", hint=known_groups())
    return registered[name]


def known_groups() -> str:
    """Return a sentence for hints: the names of all groups, or if there are none, where to write handlers."""
    if registered:
        return f"Choices are: {', '.join(sorted(registered))}."
    return "There are no groups. Write handlers into consumers.py of an app in INSTALLED_APPS."


@overload
def consumer(one: type[M1], /, *, group: str, batch_size: None = None, **more: Unpack[Options]) -> Decorator[M1, Context]: ...
@overload
def consumer(one: type[M1], /, *, group: str, batch_size: int, **more: Unpack[Options]) -> Decorator[list[M1], list[Context]]: ...
@overload
def consumer(
    one: type[M1], two: type[M2], /, *, group: str, batch_size: None = None, **more: Unpack[Options]
) -> Decorator[M1 | M2, Context]: ...
@overload
def consumer(
    one: type[M1], two: type[M2], three: type[M3], /, *, group: str, batch_size: None = None, **more: Unpack[Options]
) -> Decorator[M1 | M2 | M3, Context]: ...
@overload
def consumer(
    *types: type[Message], group: str, topic: str = "", batch_size: int | None = None, **more: Unpack[Options]
) -> Decorator[Any, Any]: ...


def consumer(
    *types: type[Message],
    group: str = "",
    topic: str = "",
    retry: RetryPolicy = RetryPolicy(),
    on_dead: OnDead = "block",
    idempotency_key: Callable[[Any], object] | None = None,
    tags: Collection[str] | None = None,
    using: str = DEFAULT_DB_ALIAS,
    time_limit: timedelta | None = None,
    batch_size: int | None = None,
    **unknown: Any,
) -> Callable[..., Any]:
    """
    Register a handler: a function `handler(message)` or `handler(message, context)` that is called once per message and group.

    The inbox row, the handler's writes to `using` and the messages it publishes there commit together. The decorated object
    is returned unchanged. A class is instantiated once, and its method `handle` is called; several threads may call it at the
    same time.

    Args:
        types: message types to handle; each has its topic in its class Meta.
        topic: handle the messages of this topic that have no handler for their type. The message is the decoded JSON, or
            bytes if its content type is not JSON.
        on_dead: what happens to a key of a `fifo` topic when its first message has used up its retries. `block`: the message
            stays first and is retried at the longest delay, with an alert. `skip`: it becomes a dead letter, and the next
            message of the key is handled.
        idempotency_key: function that returns the value that identifies a message, instead of its id:
            `lambda message: message.order_id`.
        tags: handle only messages with one of these tags.
        using: the database of the handler's writes and of the inbox row.
        time_limit: raise `outbox.errors.TimeLimitExceeded` in the handler after this time, which counts as a failure. If the
            handler does not end within 10 s after that, its process ends. By default there is no limit.
        batch_size: handle up to this many messages at once (2 to 500), in one transaction: `handler(messages)` or
            `handler(messages, contexts)`, each a list. After a failure each message is handled alone, in a list of one. Not
            allowed on ordered topics.

    Raises:
        ConfigurationError: the arguments contradict each other, or another handler of the group handles the same messages.
    """
    reject_unknown_options(unknown)
    validate_arguments(types, group, topic, tags, on_dead)
    validate_limits(time_limit, batch_size)
    validate_policies(retry, idempotency_key)
    make = partial(
        Consumer,
        group=str.__str__(group),
        retry=retry,
        on_dead=on_dead,
        idempotency_key=idempotency_key,
        tags=frozenset(map(str.__str__, tags)) if tags is not None else None,
        using=using,
        time_limit=time_limit,
        batch_size=batch_size,
    )
    topics: dict[type[Message] | None, str] = {type_: type_._meta.topic for type_ in types} or {None: topic}
    topics = {type_: str.__str__(name) for type_, name in topics.items()}
    return partial(_register, make=make, topics=topics, time_limit=time_limit)


def _register(
    target: Decorated,
    *,
    make: Callable[..., Consumer],
    topics: Mapping[type[Message] | None, str],
    time_limit: timedelta | None,
) -> Decorated:
    """
    Register a decorated function or class: a `Consumer` for each of its message types, or for its plain topic.

    Args:
        make: `Consumer` with the arguments that the decorator got; the others depend on the handler and on the message type.
        topics: the topic of each message type; a plain topic has the key None.
        time_limit: of the handler; applied here only to a coroutine.
    """
    handler, takes_context = handler_of(target)
    is_async = iscoroutinefunction(handler)
    called = run_to_end(handler, time_limit) if is_async else handler
    if not takes_context:
        called = without_context(called)
    for type_, topic in topics.items():
        _add(make(name=name_of(target), topic=topic, handler=called, type=type_, is_async=is_async))
    return target


def plain_subject(topic: str) -> str:
    """Return the subject of a handler of a plain topic, which cannot be the name of a type."""
    return f"topic {topic}"


def _add(new: Consumer) -> None:
    members = registered.get(new.group, Group(new.group)).consumers
    for other in members.values():
        if other.name == new.name:
            continue  # the module was imported again, so the new handler replaces this one
        if other.subject == new.subject:
            raise ConfigurationError(
                f"{other.name} and {new.name} both handle {new.subject} in the group {new.group!r}.",
                hint="Give one of them another group: each group sees every message.",
            )
        if other.using != new.using:
            raise ConfigurationError(
                f"{other.name} and {new.name} are in the group {new.group!r} but write to different databases "
                f"({other.using}, {new.using}).",
                hint="All handlers of a group share the inbox of one database. Give one of them another group.",
            )
    registered[new.group] = Group(new.group, {**members, new.subject: new})


def reject_unknown_options(options: Collection[str]) -> None:
    """Raise an error for options that `consumer` does not have; for options of 0.1.0, the hint names the replacement."""
    for name in options:
        if name not in REMOVED_OPTIONS:
            raise TypeError(f"consumer() got an unexpected keyword argument {name!r}")
        raise ConfigurationError(f"@consumer has no option {name!r} any more.", hint=REMOVED_OPTIONS[name])


def validate_limits(time_limit: timedelta | None, batch_size: int | None) -> None:
    if time_limit is not None and not (isinstance(time_limit, timedelta) and time_limit > timedelta(0)):
        raise ConfigurationError(f"time_limit must be a timedelta above zero, not {time_limit!r}; omit it for no limit.")
    if batch_size is not None and not (isinstance(batch_size, int) and 2 <= batch_size <= MAX_BATCH_SIZE):
        raise ConfigurationError(f"batch_size must be 2 to {MAX_BATCH_SIZE}, not {batch_size!r}; omit it for one at a time.")


def validate_policies(retry: object, idempotency_key: object) -> None:
    if not isinstance(retry, RetryPolicy):
        raise ConfigurationError(f"retry must be a policy, such as RetryPolicy(limit=3), not {retry!r}.")
    if idempotency_key is not None and not callable(idempotency_key):
        raise ConfigurationError(
            f"idempotency_key must be a function of the message, such as lambda message: message.id, not {idempotency_key!r}."
        )


def validate_arguments(types: tuple[Any, ...], group: str, topic: str, tags: Collection[str] | None, on_dead: str) -> None:
    for type_ in types:
        if not (isinstance(type_, type) and issubclass(type_, Message)):
            raise ConfigurationError(f"@consumer takes message types, not {type_!r}: @consumer(OrderPlaced, group=…).")
        if type_._meta.abstract:
            raise ConfigurationError(
                f"{type_.__name__} is abstract, so no message is of this type.", hint="Pass its types to @consumer instead."
            )
        if not type_._meta.topic:
            raise ConfigurationError(f"{type_.__name__} has no topic.", hint="Add `topic` to its class Meta.")
    if not (group and isinstance(group, str)):
        raise ConfigurationError('@consumer needs the name of a group: @consumer(OrderPlaced, group="cart").')
    if bool(types) == bool(topic):
        raise ConfigurationError(
            'A handler takes message types or a plain topic: @consumer(OrderPlaced, group="cart") or '
            '@consumer(topic="orders", group="cart").'
        )
    if on_dead not in get_args(OnDead):
        raise ConfigurationError(f'on_dead must be "block" or "skip", not {on_dead!r}.')
    if isinstance(tags, str) or (tags is not None and not (tags and all(isinstance(tag, str) for tag in tags))):
        raise ConfigurationError(f'tags must be a set of strings, such as {{"placed"}}, not {tags!r}; omit it for all tags.')
    if ANY_TAG in (tags or ()):
        raise ConfigurationError(f"tags cannot contain {ANY_TAG!r}, which stands for all tags.", hint="Omit tags for all tags.")


def handler_of(target: Callable[..., Any]) -> tuple[Callable[..., Any], bool]:
    """Return what is called with a message (a function, or `handle` of a class), and whether it also takes the context."""
    handler = target
    if isinstance(target, type):
        handler = getattr(target(), "handle", None)  # type: ignore[assignment]
    shape = "handle(self, message, context)" if isinstance(target, type) else "handler(message, context)"
    try:
        signature = inspect.signature(handler)
        takes_context = _can_be_called(signature, "message", "context")
        if not takes_context and not _can_be_called(signature, "message"):
            signature.bind("message", "context")
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{name_of(target)} cannot be called as {shape}: {error}.") from error
    called = handler if inspect.isroutine(handler) or isinstance(handler, partial) else type(handler).__call__
    if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        raise ConfigurationError(
            f"{name_of(target)} is a generator: none of its code would run.", hint="Remove `yield` from the handler."
        )
    first = next(iter(signature.parameters), "")
    if first in NOT_A_MESSAGE:
        raise ConfigurationError(
            f"The first argument of {name_of(target)} is the message, but is named {first!r}.",
            hint=f"Write {shape}; to use a method, decorate its class.",
        )
    return handler, takes_context


def _can_be_called(signature: inspect.Signature, *arguments: str) -> bool:
    with suppress(TypeError):
        signature.bind(*arguments)
        return True
    return False


def without_context(handler: Callable[[Any], object]) -> Handler:
    """Return a handler of message and context that passes on only the message."""

    def call(message: Any, context: Any) -> object:
        return handler(message)

    return call


def name_of(target: Callable[..., Any]) -> str:
    return f"{target.__module__}.{getattr(target, '__qualname__', type(target).__qualname__)}"


def run_to_end(handler: Callable[..., Any], limit: timedelta | None) -> Callable[..., object]:
    """Return a plain function that runs a coroutine function, waits for its end, and cancels it at its time limit."""

    async def run(*arguments: Any) -> object:
        try:
            async with asyncio.timeout(None if limit is None else limit.total_seconds()) as timeout:
                return await handler(*arguments)
        except TimeoutError as error:
            if timeout.expired():
                raise TimeLimitExceeded from error
            raise

    def call(*arguments: Any) -> object:
        running = _RunningCoroutine()
        try:
            return async_to_sync(running.run)(run(*arguments))
        except BaseException:
            running.cancel()  # the error may have interrupted only this thread's wait, so the coroutine may still be running
            raise

    return call


class _RunningCoroutine:
    """A coroutine of a handler, whose event loop may run in another thread."""

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._is_over = threading.Event()

    async def run(self, coroutine: Coroutine[Any, Any, object]) -> object:
        self._task = asyncio.current_task()
        try:
            return await coroutine
        finally:
            self._is_over.set()

    def cancel(self) -> None:
        """Cancel the coroutine if it has not ended, and wait up to CANCEL_SECONDS for its end."""
        if self._task is not None and not self._is_over.is_set():
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)
            self._is_over.wait(CANCEL_SECONDS)
