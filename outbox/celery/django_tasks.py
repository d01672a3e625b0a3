"""
A backend for Django's own tasks (Django 6.0 or later): `enqueue` stores a task in the transaction, and a Celery worker runs it.

    TASKS = {"default": {"BACKEND": "outbox.celery.django_tasks.OutboxBackend"}}
    CELERY_IMPORTS = ["outbox.celery.django_tasks"]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from traceback import format_exception
from typing import Any, ParamSpec, TypeVar

from celery import shared_task
from django.db import transaction
from django.tasks import DEFAULT_TASK_QUEUE_NAME, Task, TaskContext, TaskResult, TaskResultStatus
from django.tasks.backends.base import BaseTaskBackend
from django.tasks.base import TaskError
from django.tasks.signals import task_enqueued, task_finished, task_started
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.utils.json import normalize_json
from django.utils.module_loading import import_string

from outbox.celery.send import send_in_transaction
from outbox.publishing.transactions import choose_database

P = ParamSpec("P")
R = TypeVar("R")


class OutboxBackend(BaseTaskBackend):
    """
    Sends Django's tasks if the open transaction commits, and not if it is rolled back.

    OPTIONS["USING"] names the database. By default it is that of the innermost `outbox.atomic()`, otherwise the one that the
    routers choose. Tasks of the queue "default" follow Celery's routes; any other queue is Celery's queue of that name.

    `get_result` is not supported, because Celery's result backend does not store the fields of `TaskResult`. Priorities are
    rejected, because their meaning differs among Celery's brokers.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = False
    supports_priority = False

    def enqueue(self, task: Task[P, R], args: Any, kwargs: Any) -> TaskResult[P, R]:
        """
        Write a task in the open transaction.

        Raises:
            InvalidTask: this backend does not support the task.
            TypeError: the arguments cannot be encoded as JSON.
            NotInTransaction: the database has no open transaction.
        """
        self.validate_task(task)
        result = _result(task, args, kwargs, alias=self.alias, enqueued_at=timezone.now())
        alias = choose_database(f"Task {task.module_path}", using=self.options.get("USING"), about=None)
        arguments = (task.module_path, result.args, result.kwargs, self.alias, str(result.enqueued_at))
        options: dict[str, Any] = {"shadow": task.module_path}
        if task.queue_name != DEFAULT_TASK_QUEUE_NAME:
            options["queue"] = task.queue_name
        if task.run_after is not None:
            options["eta"] = task.run_after
        sent = send_in_transaction(run.signature(arguments, {}, **options), using=alias)
        result = replace(result, id=sent.id)
        transaction.on_commit(partial(task_enqueued.send, type(self), task_result=result), using=alias, robust=True)
        return result


@shared_task(name="outbox.celery.django_tasks.run", bind=True)
def run(self: Any, path: str, args: list[Any], kwargs: dict[str, Any], backend: str, enqueued_at: str) -> Any:
    """Run one of Django's tasks in a Celery worker; return the task's return value."""
    task: Task[..., Any] = import_string(path)
    result = _result(task, args, kwargs, alias=backend, enqueued_at=parse_datetime(enqueued_at))
    now = timezone.now()
    result = replace(
        result,
        id=self.request.id,
        status=TaskResultStatus.RUNNING,
        started_at=now,
        last_attempted_at=now,
        worker_ids=[self.request.hostname or ""],
    )
    task_started.send(OutboxBackend, task_result=result)
    context = (TaskContext(task_result=result),) if task.takes_context else ()
    try:
        value = normalize_json(task.call(*context, *args, **kwargs))
    except Exception as error:
        path = f"{type(error).__module__}.{type(error).__qualname__}"
        failure = TaskError(exception_class_path=path, traceback="".join(format_exception(error)))
        _finish(replace(result, status=TaskResultStatus.FAILED, errors=[failure]))
        raise
    successful = replace(result, status=TaskResultStatus.SUCCESSFUL)
    object.__setattr__(successful, "_return_value", value)  # the class is frozen; Django's own backends do the same
    _finish(successful)
    return value


def _finish(result: TaskResult[..., Any]) -> None:
    object.__setattr__(result, "finished_at", timezone.now())
    task_finished.send(OutboxBackend, task_result=result)


def _result(
    task: Task[P, R], args: Sequence[Any], kwargs: Mapping[str, Any], *, alias: str, enqueued_at: Any
) -> TaskResult[P, R]:
    return TaskResult(
        task=task,
        id="",
        status=TaskResultStatus.READY,
        enqueued_at=enqueued_at,
        started_at=None,
        finished_at=None,
        last_attempted_at=None,
        args=list(args),
        kwargs=dict(kwargs),
        backend=alias,
        errors=[],
        worker_ids=[],
    )
