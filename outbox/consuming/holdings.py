"""What the workers of this process hold, and the topics that they cannot receive from: for its heartbeats."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from outbox.brokers.base import Broker


@dataclass(frozen=True, slots=True)
class Holdings:
    """
    The state of workers after their last receive.

    Args:
        held: topic -> messages that the broker's backlog lacks.
        refusals: topic -> why it cannot be received from as configured.
    """

    held: Counter[str] = field(default_factory=Counter)
    refusals: dict[str, str] = field(default_factory=dict)


_lock = threading.Lock()
_of_workers: dict[tuple[str, str], dict[str, Holdings]] = {}  # broker and group -> by worker


def note(alias: str, group: str, worker: str, broker: Broker) -> None:
    """Remember what a worker's broker client holds now."""
    found = Holdings(Counter(broker.held(group)), broker.refusals())
    with _lock:
        _of_workers.setdefault((alias, group), {})[worker] = found


def forget(alias: str, group: str, worker: str) -> None:
    """Forget a worker whose broker client is closed."""
    with _lock:
        _of_workers.get((alias, group), {}).pop(worker, None)


def read(alias: str, group: str) -> Holdings:
    """Return the sum of all workers of a group at a broker."""
    total = Holdings()
    with _lock:
        for one in _of_workers.get((alias, group), {}).values():
            total.held.update(one.held)
            total.refusals.update(one.refusals)
    return total
