"""`@transactional`: the function it decorates and what it publishes commit together, or not at all."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container
from functools import partial, wraps
from typing import Any, TypeVar, cast, overload

from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.db import transaction as django_transaction
from django.http.response import HttpResponseBase

from outbox.errors import ConfigurationError
from outbox.publish.transactions import transaction

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
RollbackOn = Container[int] | Callable[[HttpResponseBase], bool]


@overload
def transactional(function: Decorated, /) -> Decorated: ...
@overload
def transactional(*, using: str | None = None, rollback_on: RollbackOn | None = None) -> Callable[[Decorated], Decorated]: ...


def transactional(
    function: Decorated | None = None, /, *, using: str | None = None, rollback_on: RollbackOn | None = None
) -> Decorated | Callable[[Decorated], Decorated]:
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

    Raises:
        ConfigurationError: a class or a generator function was decorated.
    """
    if function is None:
        return partial(_decorate, using=using, rollback_on=rollback_on)
    return _decorate(function, using=using, rollback_on=rollback_on)


def _decorate(function: Decorated, *, using: str | None, rollback_on: RollbackOn | None) -> Decorated:
    _refuse_unfit(function)

    def run(call: Callable[[], Any]) -> Any:
        with transaction(using) as alias:
            result = call()
            if isinstance(result, HttpResponseBase) and _is_failure(result, rollback_on):
                django_transaction.set_rollback(True, using=alias)
            return result

    if iscoroutinefunction(function):

        @wraps(function)
        async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
            return await sync_to_async(run)(partial(async_to_sync(function), *args, **kwargs))

        return cast("Decorated", async_wrapper)

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return run(partial(function, *args, **kwargs))

    return cast("Decorated", wrapper)


def _is_failure(response: HttpResponseBase, rollback_on: RollbackOn | None) -> bool:
    if getattr(response, "exception", False):
        return True
    if rollback_on is None:
        return False
    return rollback_on(response) if callable(rollback_on) else response.status_code in rollback_on


def _refuse_unfit(function: Callable[..., Any]) -> None:
    name = getattr(function, "__qualname__", repr(function))
    if inspect.isclass(function):
        raise ConfigurationError(
            f"@transactional cannot decorate the class {name}. Decorate a method of it, or use "
            '@method_decorator(transactional, name="dispatch").'
        )
    if not callable(function):
        raise ConfigurationError(f'@transactional cannot decorate {name}. A database is named by using="...".')
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(
            f"@transactional cannot decorate the generator {name}: its body runs after the call has returned. "
            "Use `with outbox.transaction():` in it."
        )
