"""The base class of tasks that can be sent in a transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from celery.contrib.django.task import DjangoTask
from celery.result import AsyncResult

if TYPE_CHECKING:
    Base = DjangoTask[Any, Any]
else:
    Base = DjangoTask


class OutboxTask(Base):
    """
    A task with `delay_in_transaction` and `apply_in_transaction`.

    For one task: `@shared_task(base=OutboxTask)`. For all tasks of an app: `Celery("shop", task_cls="outbox.celery:OutboxTask")`.
    """

    def delay_in_transaction(self, *args: Any, **kwargs: Any) -> AsyncResult[Any]:
        """Send the task with these arguments if the open transaction commits. See `send_in_transaction`."""
        return self.apply_in_transaction(args, kwargs)

    def apply_in_transaction(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        using: str | None = None,
        **options: Any,
    ) -> AsyncResult[Any]:
        """
        Send the task if the open transaction commits. See `send_in_transaction`.

        Args:
            using: the database, as for `send_in_transaction`.
            options: options of `apply_async`. docs/how-to/celery-tasks.md lists those that are supported.
        """
        # Imported here, because the module imports models, and a Celery app is created before Django is ready.
        from outbox.celery.send import send_in_transaction

        result: AsyncResult[Any] = send_in_transaction(
            self.signature(tuple(args or ()), dict(kwargs or {}), **options), using=using
        )
        return result
