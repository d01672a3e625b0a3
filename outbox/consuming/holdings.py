"""What the workers of this process hold and handle, and the topics that they cannot receive from: for its heartbeats."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from outbox.brokers.base import Broker
from outbox.consuming.lease_thread import LeaseThread
from outbox.database.heartbeats import Handling


@dataclass(slots=True)
class Holdings:
    """
    The state of workers.

    Args:
        held: topic -> messages that the broker's backlog lacks.
        refusals: topic -> why it cannot be received from as configured.
        handling: the handler that has been running for the longest time; None if none runs.
    """

    held: Counter[str] = field(default_factory=Counter)
    refusals: dict[str, str] = field(default_factory=dict)
    handling: Handling | None = None


_lock = threading.Lock()
_clients: dict[tuple[str, str], WeakValueDictionary[str, Broker]] = {}  # broker and group -> by worker
_lease_threads: dict[tuple[str, str], WeakValueDictionary[str, LeaseThread]] = {}


def note(alias: str, group: str, worker: str, broker: Broker, lease_thread: LeaseThread) -> None:
    """Remember what a worker receives and handles with."""
    with _lock:
        _clients.setdefault((alias, group), WeakValueDictionary())[worker] = broker
        _lease_threads.setdefault((alias, group), WeakValueDictionary())[worker] = lease_thread


def forget(alias: str, group: str, worker: str) -> None:
    """Forget a worker whose broker client is closed."""
    with _lock:
        for known in (_clients, _lease_threads):
            known.get((alias, group), WeakValueDictionary()).pop(worker, None)


def read(alias: str, group: str) -> Holdings:
    """Return the sum of all workers of a group at a broker."""
    with _lock:
        clients = list(_clients.get((alias, group), {}).values())
        lease_threads = list(_lease_threads.get((alias, group), {}).values())
    total = Holdings()
    for broker in clients:
        total.held.update(broker.held(group))
        total.refusals.update(broker.refusals())
    running = [one for one in (lease_thread.running() for lease_thread in lease_threads) if one is not None]
    total.handling = max(running, key=lambda one: one.seconds, default=None)
    return total
