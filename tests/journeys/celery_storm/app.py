"""
The storm's Celery app.

Its task writes down each run, and whether it ran before its transaction was committed.
"""

from celery import Celery
from django.db import connection
from kombu import Exchange, Queue

from outbox.celery import OutboxTask
from tests.journeys.celery_storm.given import GOOD, POISON, POISON_TYPE, given

app = Celery("storm", task_cls=OutboxTask)
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["outbox"])
is_redis = given["read"].startswith("redis")
app.conf.task_queues = [
    Queue(GOOD, Exchange(GOOD), GOOD),
    Queue("outbox", Exchange("outbox"), "outbox"),
    # RabbitMQ closes the connection over it; on Redis the relay's user may not touch its key.
    Queue(POISON, Exchange(POISON, type="direct" if is_redis else POISON_TYPE), POISON),
]
app.conf.task_default_queue = GOOD
if is_redis:
    app.conf.broker_transport_options |= {"unacked_restore_interval": 1, "unacked_restore_throttle": 1}

NOTE = "INSERT INTO storm_run (number, is_early) SELECT %s, NOT EXISTS (SELECT 1 FROM storm_published WHERE number = %s)"


@app.task(name="storm.run", acks_late=True, reject_on_worker_lost=True, ignore_result=True)
def run(number: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute(NOTE, [number, number])
