"""
The pool of broker clients with which this process sends and ends half messages that go half first.

If a broker's client is thread-safe, all threads share one. Otherwise each transaction has a client for itself, which goes to the
pool of idle clients after the transaction. Clients are made when they are needed; a forked child process makes new ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from outbox import conf
from outbox.brokers.base import Broker
from outbox.brokers.capabilities import HalfMessages
from outbox.check_backs.loop import listen_in_this_process
from outbox.forks import ForkSafeLock

# (process id, alias) -> the settings from which clients were made, and the idle clients. No lock is needed, since pop() and
# append() of a list are atomic.
_idle: dict[tuple[int, str], tuple[conf.Settings, list[Broker]]] = {}


class _Shared(msgspec.Struct):
    """A client that all threads share. `_lock` guards `users`, their number. The last user of a retired client closes it."""

    broker: Broker
    settings: conf.Settings
    users: int = 0
    is_retired: bool = False  # the settings have changed, so new users get another client


_shared: dict[tuple[int, str], _Shared] = {}
_lock = ForkSafeLock()


@contextmanager
def acquire(alias: str, using: str) -> Iterator[Broker]:
    """
    Provide a client that is thread-safe, or that no other thread uses during the block.

    Args:
        using: the database for check-backs about half messages without a token, if the broker asks its producers.
    """
    kind = conf.broker_class(alias)
    lend = _lend_shared if issubclass(kind, HalfMessages) and kind.is_thread_safe else _lend_exclusive
    with lend(alias, using) as broker:
        yield broker


def close_idle() -> None:
    """Close the clients of this process that no thread uses, for example before a test database is dropped."""
    for (pid, _), (_, idle) in list(_idle.items()):
        if pid == os.getpid():
            _close(idle)
    with _lock.current:
        unused = [key for key, shared in _shared.items() if key[0] == os.getpid() and not shared.users]
        retired = [_shared.pop(key) for key in unused]
    for shared in retired:
        shared.broker.close()


@contextmanager
def _lend_exclusive(alias: str, using: str) -> Iterator[Broker]:
    idle = _idle_of(alias)
    try:
        broker = idle.pop()
    except IndexError:
        broker = conf.make_broker(alias)
        listen_in_this_process(alias, using)
    try:
        yield broker
    finally:
        if _idle_of(alias) is idle:
            idle.append(broker)
        else:  # the settings have changed meanwhile
            broker.close()


@contextmanager
def _lend_shared(alias: str, using: str) -> Iterator[Broker]:
    shared = _join(alias)
    try:
        listen_in_this_process(alias, using)  # does nothing if it has succeeded before
        yield shared.broker
    finally:
        _release(shared)


def _join(alias: str) -> _Shared:
    """Return the client that all threads share, and count the caller as a user until `_release`."""
    key, settings = (os.getpid(), alias), conf.settings()
    with _lock.current:
        shared = _shared.get(key)
        if shared is None or shared.settings is not settings:
            old, shared = shared, _Shared(conf.make_broker(alias), settings)
            _shared[key] = shared
            _retire(old)
        shared.users += 1
        return shared


def _release(shared: _Shared) -> None:
    with _lock.current:
        shared.users -= 1
        if shared.is_retired:
            _retire(shared)


def _retire(shared: _Shared | None) -> None:
    """Close a client that was made from older settings: now if it has no users, otherwise when the last one releases it."""
    if shared is not None:
        shared.is_retired = True
        if not shared.users:
            shared.broker.close()


def _idle_of(alias: str) -> list[Broker]:
    settings = conf.settings()
    made_from, idle = _idle.setdefault((os.getpid(), alias), (settings, []))
    if made_from is not settings:
        _close(idle)
        _idle[os.getpid(), alias] = settings, (idle := [])
    return idle


def _close(idle: list[Broker]) -> None:
    with suppress(IndexError):
        while True:
            idle.pop().close()
