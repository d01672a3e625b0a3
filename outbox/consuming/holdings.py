"""The *holdings* that a process's heartbeats report of its workers: the running handler, and topics that its broker refuses."""

from __future__ import annotations

import threading
from typing import Protocol
from weakref import WeakValueDictionary

from outbox.database.heartbeats import Handling

Holdings = tuple[dict[str, str], Handling | None]
"""A pair: topics that the broker does not serve -> the reason; and the handler that has been running the longest, or None."""


class _Worker(Protocol):
    def holdings(self) -> Holdings:
        """Return the holdings of this worker; may be called from any thread."""


_lock = threading.Lock()
_workers: dict[tuple[str, str], WeakValueDictionary[str, _Worker]] = {}  # (broker alias, group) -> worker's name -> worker


def register_worker(alias: str, group: str, name: str, worker: _Worker) -> None:
    """Register a worker until it is garbage collected."""
    with _lock:
        _workers.setdefault((alias, group), WeakValueDictionary())[name] = worker


def read_holdings(alias: str, group: str) -> Holdings:
    """Return the combined holdings of all workers of a group at a broker."""
    with _lock:
        workers = list(_workers.get((alias, group), {}).values())
    refusals: dict[str, str] = {}
    running = []
    for refused, handling in (worker.holdings() for worker in workers):
        refusals |= refused
        if handling is not None:
            running.append(handling)
    return refusals, max(running, key=lambda handling: handling.seconds, default=None)
