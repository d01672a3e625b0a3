"""
Celery tasks through the outbox: a task is sent if the transaction commits, and not if it is rolled back.

`send.py` is what callers use, `task.py` puts it on tasks, `django_tasks.py` is a backend for Django's own tasks. `canvas.py`
has Celery build the very messages that it would send, and `stored.py` writes them into message rows. A relay hands them to
Celery's broker over `broker.py`: with `confirms.py` to RabbitMQ, with `direct.py` to all others.

What runs the outbox on Celery is elsewhere: `outbox/tasks.py` (relay, sweep, maintenance, consume), `outbox/schedule.py`
(beat), `publishing/wakeup.py` (a commit wakes a worker) and `checks/celery.py`.

The public names are imported on first use, so that the name of the broker in the settings needs no Celery app.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox.celery.broker import CeleryBroker
    from outbox.celery.send import send_in_transaction
    from outbox.celery.task import OutboxTask

_HOMES = {
    "CeleryBroker": "outbox.celery.broker",
    "OutboxTask": "outbox.celery.task",
    "send_in_transaction": "outbox.celery.send",
}

__all__ = ["CeleryBroker", "OutboxTask", "send_in_transaction"]


def __getattr__(name: str) -> Any:
    try:
        home = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module 'outbox.celery' has no attribute {name!r}") from None
    import_module("outbox.conf.apps").require_outbox()
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
