"""Send a Celery task in a transaction without an outbox: at once, or after the commit."""

from __future__ import annotations

from functools import partial
from typing import Any

from celery import Task
from django.db import transaction

from project.demo.compare.shop import DELAY, way


def send(task: Task[Any, Any], **arguments: Any) -> None:
    if way() == DELAY:
        task.delay(**arguments)
    else:
        transaction.on_commit(partial(task.delay, **arguments))
