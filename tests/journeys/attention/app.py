"""The Celery app of situations; its task is one that a project sends in a transaction."""

from celery import Celery

from outbox.celery import OutboxTask

app = Celery("situations", task_cls=OutboxTask)
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["outbox"])


@app.task(name="situations.invoice", ignore_result=True)
def invoice() -> None: ...
