"""
Celery tasks through the outbox: a task is sent if the transaction commits, and not if it is rolled back.

`send.py` has the function that callers use, `task.py` makes it a method of tasks, and `django_tasks.py` is a backend for Django's
own tasks. `canvas.py` lets Celery build the messages that Celery would send, and `stored.py` encodes them for message rows. A
relay sends them to Celery's broker with `broker.py`, which uses `confirms.py` for RabbitMQ and `direct.py` for all other servers.

Other modules run the outbox itself on Celery: `outbox/tasks.py` (relay, sweep, maintenance, consume), `outbox/schedule.py`
(beat), `publishing/wakeup.py` (a commit wakes a worker) and `checks/celery.py`.

The public names are imported on first use, so that settings can name the broker before there is a Celery app.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox.celery.broker import CeleryBroker
    from outbox.celery.send import send_in_transaction
    from outbox.celery.task import OutboxTask

_MODULES = {
    "CeleryBroker": "outbox.celery.broker",
    "OutboxTask": "outbox.celery.task",
    "send_in_transaction": "outbox.celery.send",
}

__all__ = ["CeleryBroker", "OutboxTask", "send_in_transaction"]


def __getattr__(name: str) -> Any:
    try:
        module = _MODULES[name]
    except KeyError:
        raise AttributeError(f"module 'outbox.celery' has no attribute {name!r}") from None
    import_module("outbox.conf.apps").require_outbox()
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
