"""Functions that build the messages that go half first: the argument `build` of `@transactional(half_first=build)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, get_args, get_type_hints

from asgiref.sync import iscoroutinefunction
from django.db.models import Model

from outbox.errors import ConfigurationError
from outbox.message import Message

Build = Callable[..., "Message | tuple[Message, Model]"]

registered: dict[Build, None] = {}  # an ordered set: method_decorator registers the same function at each call of the method


def remember(build: Build, function: Callable[..., Any]) -> None:
    """
    Register `build`, which builds the message for the decorated `function`, so that system checks find it.

    Raises:
        ConfigurationError: `build` is not a plain function, or `function` has no parameter `message`.
    """
    if not callable(build) or iscoroutinefunction(build):
        raise ConfigurationError(
            f"@transactional(half_first={build!r}) needs a plain function that builds the message, not a coroutine function. It "
            "is called in the thread that holds the transaction."
        )
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not takes_any and "message" not in parameters:
        raise ConfigurationError(
            f"{function.__qualname__} has half_first={build.__qualname__}, but no parameter `message`.",
            hint="Add a parameter of that name: the function gets the message that was built.",
        )
    registered[build] = None


def part(built: Message | tuple[Message, Model]) -> tuple[Message, Model | None]:
    """Return the built message, and the model instance that it is about; None if `build` returned only a message."""
    return built if isinstance(built, tuple) else (built, None)


def built_types() -> Iterator[tuple[str, type[Message]]]:
    """Yield pairs: the name of a registered function, and a message type in its return annotation."""
    for build in registered:
        hints: dict[str, Any] = {}
        with suppress(NameError):  # the annotation uses a name that is only imported for type checkers
            hints = get_type_hints(build)
        for kind in _parts_of(hints.get("return")):
            if inspect.isclass(kind) and issubclass(kind, Message):
                yield f"{build.__module__}.{build.__qualname__}", kind


def _parts_of(hint: Any) -> Iterator[Any]:
    """Yield the members of unions and tuples in an annotation."""
    parts = get_args(hint)
    if not parts:
        yield hint
    for part in parts:
        yield from _parts_of(part)
