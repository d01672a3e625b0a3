"""
The brokers of this process for half first.

Where a broker says that it is thread-safe, all threads share one. Else there is one for each transaction that is open at
once, kept for the next. Made at first use, so after any fork; a child of a fork makes its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from outbox import conf
from outbox.brokers.base import Broker
from outbox.brokers.capabilities import HalfMessages
from outbox.check_backs.checker import listen_in_this_process

# (process, alias) -> brokers nobody uses, and the settings they were made by. A list's pop and append are atomic.
_idle: dict[tuple[int, str], tuple[conf.Settings, list[Broker]]] = {}


@dataclass(slots=True)
class _Shared:
    """A broker that all threads share. Count `users` under the lock; whoever leaves it last, once it is retired, closes it."""

    broker: Broker
    settings: conf.Settings
    users: int = 0
    is_retired: bool = False


_shared: dict[tuple[int, str], _Shared] = {}
_lock = threading.Lock()


def _renew_lock() -> None:
    """Another thread of the parent may have held it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


@contextmanager
def acquire(alias: str, using: str) -> Iterator[Broker]:
    """
    Lend a broker that nobody else uses meanwhile, or that is thread-safe.

    Args:
        using: the database that this process answers check-backs from, where the broker asks those who send to it.
    """
    lend = _lend_shared if HalfMessages.of(conf.broker_class(alias)).is_thread_safe else _lend_own
    with lend(alias, using) as broker:
        yield broker


def close_idle() -> None:
    """Close the brokers of this process that nobody uses: before a test's database is dropped, say."""
    for (pid, _), (_, idle) in list(_idle.items()):
        if pid == os.getpid():
            _close(idle)
    with _lock:
        unused = [key for key, shared in _shared.items() if key[0] == os.getpid() and not shared.users]
        retired = [_shared.pop(key) for key in unused]
    for shared in retired:
        shared.broker.close()


@contextmanager
def _lend_own(alias: str, using: str) -> Iterator[Broker]:
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
        else:  # settings have changed meanwhile
            broker.close()


@contextmanager
def _lend_shared(alias: str, using: str) -> Iterator[Broker]:
    shared = _join(alias)
    try:
        listen_in_this_process(alias, using)  # once, and again where it failed
        yield shared.broker
    finally:
        _leave(shared)


def _join(alias: str) -> _Shared:
    """Return the broker that all threads share."""
    key, settings = (os.getpid(), alias), conf.settings()
    with _lock:
        shared = _shared.get(key)
        if shared is None or shared.settings is not settings:
            old, shared = shared, _Shared(conf.make_broker(alias), settings)
            _shared[key] = shared
            _retire(old)
        shared.users += 1
        return shared


def _leave(shared: _Shared) -> None:
    with _lock:
        shared.users -= 1
        if shared.is_retired:
            _retire(shared)


def _retire(shared: _Shared | None) -> None:
    """Close a broker that was made by other settings as soon as nobody uses it."""
    if shared is not None:
        shared.is_retired = True
        if not shared.users:
            shared.broker.close()


def _idle_of(alias: str) -> list[Broker]:
    settings = conf.settings()
    made_by, idle = _idle.setdefault((os.getpid(), alias), (settings, []))
    if made_by is not settings:
        _close(idle)
        _idle[os.getpid(), alias] = settings, (idle := [])
    return idle


def _close(idle: list[Broker]) -> None:
    with suppress(IndexError):
        while True:
            idle.pop().close()
