"""
The brokers of this process for half first: one for each transaction that is open at once, kept for the next.

Made at first use, so after any fork; a child of a fork makes its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from outbox import conf
from outbox.brokers.base import Broker
from outbox.check_backs.ask import in_process
from outbox.check_backs.checker import listen_in_this_process

# (process, alias) -> brokers nobody uses, and the settings they were made by. A list's pop and append are atomic.
_idle: dict[tuple[int, str], tuple[conf.Settings, list[Broker]]] = {}


@contextmanager
def acquire(alias: str, using: str) -> Iterator[Broker]:
    """
    Give a broker that nobody else uses meanwhile.

    Args:
        using: the database that this process answers check-backs from, where the broker asks those who send to it.
    """
    idle = _idle_of(alias)
    try:
        broker = idle.pop()
    except IndexError:
        broker = conf.make_broker(alias)
        listen_in_this_process(alias, in_process(using))
    try:
        yield broker
    finally:
        if _idle_of(alias) is idle:
            idle.append(broker)
        else:  # settings have changed meanwhile
            broker.close()


def close_idle() -> None:
    """Close the brokers of this process that nobody uses: before a test's database is dropped, say."""
    for (pid, _), (_, idle) in list(_idle.items()):
        if pid == os.getpid():
            _close(idle)


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
