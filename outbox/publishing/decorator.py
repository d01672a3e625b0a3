"""`@transactional`: the function it decorates and what it publishes commit together, or not at all."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Coroutine
from functools import partial, wraps
from typing import Any, NoReturn, TypeVar, overload

from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.db import transaction
from django.http.response import HttpResponseBase

from outbox.errors import ConfigurationError
from outbox.half_first.build import Build, part, remember
from outbox.publishing.transactions import atomic

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
Result = TypeVar("Result")
RollbackOn = Container[int] | Callable[[HttpResponseBase], bool]


@overload
def transactional(function: Decorated, /) -> Decorated: ...
@overload
def transactional(*, using: str | None = None, rollback_on: RollbackOn | None = None) -> Callable[[Decorated], Decorated]: ...
@overload
def transactional(
    *, half_first: Build, using: str | None = None, rollback_on: RollbackOn | None = None
) -> Callable[[Callable[..., Result]], Callable[..., Result]]: ...


def transactional(
    function: Callable[..., Any] | None = None,
    /,
    *,
    using: str | None = None,
    rollback_on: RollbackOn | None = None,
    half_first: Build | None = None,
) -> Callable[..., Any]:
    """
    Run the decorated function in a transaction; in one that is open already, in a savepoint.

    For function views, methods of class-based views and of REST framework's views (actions too), plain functions, and the
    same as coroutine functions. A whole class: `@method_decorator(transactional, name="dispatch")`.

    An exception rolls back. So does a response that REST framework made of one (`response.exception`), which a decorator
    outside of `@api_view` sees instead. Other responses commit, whatever their status, as with Django's ATOMIC_REQUESTS.

    A coroutine function runs in the event loop; its transaction is held open by the thread that `sync_to_async` uses, and
    so by Django's async calls and `apublish()`. Cancelled, it rolls back.

    Args:
        using: the database's alias, by default where the routers write messages.
        rollback_on: responses that roll back too: status codes (`range(400, 600)`), or a function of the response.
        half_first: called before the transaction, with the function's arguments; gives the message that goes to its broker
            as a half message before the function is called, or (message, row it is about). The function gets the message
            as `message=`. See docs/how-to/half-first.md.

    Raises:
        ConfigurationError: a class or a generator function was decorated, or a function that takes no `message=` half first.
    """
    if function is None:
        return partial(_decorate, using=using, rollback_on=rollback_on, half_first=half_first)
    return _decorate(function, using=using, rollback_on=rollback_on, half_first=half_first)


def _decorate(
    function: Callable[..., Any], *, using: str | None, rollback_on: RollbackOn | None, half_first: Build | None
) -> Callable[..., Any]:
    _refuse_unfit(function)
    if half_first is not None:
        remember(half_first, function)

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        opening: dict[str, Any] = {}
        if half_first is not None:
            message, about = part(half_first(*args, **kwargs))
            opening = {"half_first": message, "about": about}
            kwargs["message"] = message
        with atomic(using, **opening) as alias:
            result = function(*args, **kwargs)
            if inspect.iscoroutine(result):
                _refuse_to_leave(result, function)
            if isinstance(result, HttpResponseBase) and _is_failure(result, rollback_on):
                transaction.set_rollback(True, using=alias)
            return result

    if iscoroutinefunction(function):

        @wraps(function)
        async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
            return await sync_to_async(run)(async_to_sync(function), *args, **kwargs)

        return async_wrapper

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return run(function, *args, **kwargs)

    return wrapper


def _is_failure(response: HttpResponseBase, rollback_on: RollbackOn | None) -> bool:
    if getattr(response, "exception", False):
        return True
    if rollback_on is None:
        return False
    return rollback_on(response) if callable(rollback_on) else response.status_code in rollback_on


def _refuse_to_leave(coroutine: Coroutine[Any, Any, Any], function: Callable[..., Any]) -> NoReturn:
    """Raise where the work would begin when its transaction has ended."""
    coroutine.close()
    raise ConfigurationError(
        f"{getattr(function, '__qualname__', repr(function))} returned a coroutine, and is not marked as a coroutine function: "
        "nothing of it would run in the transaction.",
        hint="Put @transactional right above the `async def`, below the decorator that hides it.",
    )


def _refuse_unfit(function: Callable[..., Any]) -> None:
    name = getattr(function, "__qualname__", repr(function))
    if inspect.isclass(function):
        raise ConfigurationError(
            f"@transactional cannot decorate the class {name}.",
            hint='Decorate a method of it, or use @method_decorator(transactional, name="dispatch").',
        )
    if not callable(function):
        raise ConfigurationError(f"@transactional cannot decorate {name}.", hint='A database is named by using="...".')
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(
            f"@transactional cannot decorate the generator {name}: its body runs after the call has returned.",
            hint="Use `with outbox.atomic():` in it.",
        )
