"""The journey's Celery app: a task leaves a line in a file each time that it runs."""

import os
from pathlib import Path

from celery import Celery

from outbox.celery import OutboxTask

app = Celery("journey", broker=os.environ.get("CELERY_BROKER_URL"), task_cls=OutboxTask)
app.conf.worker_hijack_root_logger = False
app.conf.broker_connection_retry_on_startup = True


@app.task(name="journey.run", bind=True, acks_late=True, ignore_result=True)
def run(self, number: int) -> None:
    with Path(os.environ["JOURNEY_RUNS"]).open("a") as file:
        file.write(f"{self.request.id} {number}\n")
