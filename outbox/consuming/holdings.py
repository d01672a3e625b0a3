"""The current work of this process's workers, for its heartbeats."""

from __future__ import annotations

import threading
from typing import Protocol
from weakref import WeakValueDictionary

import msgspec

from outbox.database.heartbeats import Handling


class Holdings(msgspec.Struct):
    """
    The state of workers.

    Args:
        refusals: topic -> why it cannot be received from, or is not for a while.
        handling: the handler that has been running for the longest time; None if none runs.
    """

    refusals: dict[str, str] = msgspec.field(default_factory=dict)
    handling: Handling | None = None


class _Worker(Protocol):
    def holdings(self) -> Holdings:
        """Return the worker's state; called from any thread."""


_lock = threading.Lock()
_workers: dict[tuple[str, str], WeakValueDictionary[str, _Worker]] = {}  # broker and group -> by name


def note_worker(alias: str, group: str, name: str, worker: _Worker) -> None:
    """Remember a worker, as long as it exists."""
    with _lock:
        _workers.setdefault((alias, group), WeakValueDictionary())[name] = worker


def read_holdings(alias: str, group: str) -> Holdings:
    """Return the sum of all workers of a group at a broker."""
    with _lock:
        workers = list(_workers.get((alias, group), {}).values())
    total = Holdings()
    running = []
    for holdings in (worker.holdings() for worker in workers):
        total.refusals.update(holdings.refusals)
        if holdings.handling is not None:
            running.append(holdings.handling)
    total.handling = max(running, key=lambda handling: handling.seconds, default=None)
    return total
