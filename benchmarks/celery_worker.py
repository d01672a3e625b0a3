"""
The app of a Celery worker, and of the relay that sends it tasks.

    celery -A benchmarks.celery_worker worker
"""

from __future__ import annotations

import os
import time

import django
from celery import Celery
from django.apps import apps
from django.db import connection

from benchmarks.bare_rabbitmq import HANDLE

if not apps.ready:  # in a worker
    django.setup()

from outbox.celery import OutboxTask

QUEUE = "bench-clocked"

app = Celery("bench-clocked", set_as_current=False, task_cls=OutboxTask)
app.conf.broker_url = f"amqp://guest:guest@{os.environ.get('BENCH_RABBITMQ', 'localhost')}//"
app.conf.broker_transport_options = {"confirm_publish": True}
app.conf.task_default_queue = QUEUE
app.conf.worker_hijack_root_logger = False


@app.task(name="bench.clocked", ignore_result=True, shared=False)
def clocked(number: int) -> None:
    """Record the start of the task."""
    began = time.time()
    with connection.cursor() as cursor:
        cursor.execute(HANDLE, [number, began])
