"""Tasks of Django's own, and what they have done. Django 6.0 or later imports it."""

from typing import Any

from django.tasks import task

calls: list[Any] = []


@task
def count(number: int) -> int:
    calls.append(number)
    return number + 1


@task(takes_context=True)
def tell(context: Any) -> None:
    calls.append((context.task_result.id, context.attempt))


@task
async def later(number: int) -> int:
    return number * 2


@task
def fail() -> None:
    raise LookupError("no")
