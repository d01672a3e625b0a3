"""`@check_back`: functions of the project that answer for half messages of other producers, by topic."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from outbox.errors import ConfigurationError
from outbox.message import Half, Resolution

Resolver = Callable[[Half], Resolution]

registered: dict[str, Resolver] = {}


def check_back(topic: str) -> Callable[[Resolver], Resolver]:
    """
    Register the decorated function to answer for half messages of a topic that this outbox did not send.

    The function receives the half message (without headers and body if the check-back came over HTTP), looks up the business row,
    and returns COMMIT, ROLLBACK or UNKNOWN. It must not block, because the broker and the web server's worker wait for it.

    Raises:
        ConfigurationError: the topic already has such a function.
    """
    if callable(topic):
        raise ConfigurationError('@check_back needs the name of a topic: @check_back("orders").')

    def register(function: Resolver) -> Resolver:
        if topic in registered:
            raise ConfigurationError(
                f"Topic {topic!r} has two check-back functions: {_name(registered[topic])} and {_name(function)}.",
                hint="Keep one of them.",
            )
        registered[topic] = function
        return function

    return register


def resolvers() -> Mapping[str, Resolver]:
    """Return all registered functions by topic."""
    return dict(registered)


def resolver_of(topic: str) -> Resolver | None:
    """Return the function that answers for half messages of a topic that have no token of the outbox, or None."""
    return registered.get(topic)


def _name(function: Resolver) -> str:
    return f"{function.__module__}.{function.__qualname__}"
