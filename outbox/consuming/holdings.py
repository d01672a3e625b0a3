"""What the workers of this process hold, and the topics that they cannot receive from: for its heartbeats."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from outbox.brokers.base import Broker


@dataclass(frozen=True, slots=True)
class Holdings:
    """
    The state of workers.

    Args:
        held: topic -> messages that the broker's backlog lacks.
        refusals: topic -> why it cannot be received from as configured.
    """

    held: Counter[str] = field(default_factory=Counter)
    refusals: dict[str, str] = field(default_factory=dict)


_lock = threading.Lock()
_clients: dict[tuple[str, str], WeakValueDictionary[str, Broker]] = {}  # broker and group -> by worker


def note(alias: str, group: str, worker: str, broker: Broker) -> None:
    """Remember the broker client of a worker."""
    with _lock:
        _clients.setdefault((alias, group), WeakValueDictionary())[worker] = broker


def forget(alias: str, group: str, worker: str) -> None:
    """Forget a worker whose broker client is closed."""
    with _lock:
        if (clients := _clients.get((alias, group))) is not None:
            clients.pop(worker, None)


def read(alias: str, group: str) -> Holdings:
    """Return the sum of all workers of a group at a broker."""
    with _lock:
        clients = list(_clients.get((alias, group), {}).values())
    total = Holdings()
    for broker in clients:
        total.held.update(broker.held(group))
        total.refusals.update(broker.refusals())
    return total
