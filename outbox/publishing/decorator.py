"""`@transactional`: the rows and messages of the decorated function are committed together, or not at all."""

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
    Run the decorated function in a transaction, or in a savepoint if a transaction is open already.

    It decorates function views, methods of class-based views and of REST framework's views (also actions), and plain functions;
    each of them may be a coroutine function. For a whole class, use `@method_decorator(transactional, name="dispatch")`.

    An exception rolls back. So does a response that REST framework has made of an exception (`response.exception`): a decorator
    outside of `@api_view` gets this response instead of the exception. Other responses commit, whatever their status, as with
    Django's ATOMIC_REQUESTS.

    A coroutine function runs in the event loop; its transaction is held open by the thread that `sync_to_async` uses, in which
    Django's async calls and `apublish()` run, too. If the coroutine is cancelled, the transaction is rolled back.

    Args:
        using: the database's alias; by default, the database to which the routers write messages.
        rollback_on: responses that also roll back: status codes (`range(400, 600)`), or a function of the response.
        half_first: a function that is called with the decorated function's arguments before the transaction begins. It returns
            the message that is sent to its broker as a half message before the decorated function is called, or a tuple of
            the message and the row that it is about. The decorated function gets the message as `message=`. See
            docs/how-to/half-first.md.

    Raises:
        ConfigurationError: a class or a generator function was decorated; or, with `half_first`, a function that takes no
            `message=`.
    """
    if function is None:
        return partial(_decorate, using=using, rollback_on=rollback_on, half_first=half_first)
    return _decorate(function, using=using, rollback_on=rollback_on, half_first=half_first)


def _decorate(
    function: Callable[..., Any], *, using: str | None, rollback_on: RollbackOn | None, half_first: Build | None
) -> Callable[..., Any]:
    _require_decoratable(function)
    if half_first is not None:
        remember(half_first, function)

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        options: dict[str, Any] = {}
        if half_first is not None:
            message, about = part(half_first(*args, **kwargs))
            options = {"half_first": message, "about": about}
            kwargs["message"] = message
        with atomic(using, **options) as alias:
            result = function(*args, **kwargs)
            if inspect.iscoroutine(result):
                _reject_coroutine(result, function)
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


def _reject_coroutine(coroutine: Coroutine[Any, Any, Any], function: Callable[..., Any]) -> NoReturn:
    """Raise, because the coroutine would run only after its transaction has ended."""
    coroutine.close()
    raise ConfigurationError(
        f"{getattr(function, '__qualname__', repr(function))} returned a coroutine, and is not marked as a coroutine function, "
        "so nothing of it would run in the transaction.",
        hint="Put @transactional right above the `async def`, below the decorator that hides it.",
    )


def _require_decoratable(function: Callable[..., Any]) -> None:
    name = getattr(function, "__qualname__", repr(function))
    if inspect.isclass(function):
        raise ConfigurationError(
            f"@transactional cannot decorate the class {name}.",
            hint='Decorate a method of it, or use @method_decorator(transactional, name="dispatch").',
        )
    if not callable(function):
        raise ConfigurationError(f"@transactional cannot decorate {name}.", hint='To name a database, pass using="...".')
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(
            f"@transactional cannot decorate the generator {name}: its body runs after the call has returned.",
            hint="Use `with outbox.atomic():` in it.",
        )
