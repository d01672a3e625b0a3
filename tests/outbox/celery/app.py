"""A Celery app of the tests, with a broker in memory where no other is named."""

import os

from celery import Celery
from kombu import Exchange, Queue

from outbox.celery import OutboxTask

app = Celery(
    "outbox-tests",
    broker=os.environ.get("CELERY_BROKER_URL", "memory://"),
    backend=os.environ.get("CELERY_RESULT_BACKEND", "cache+memory://"),
    set_as_current=False,
    task_cls=OutboxTask,
)
app.conf.task_routes = {"tests.routed": {"queue": "routed"}}
app.conf.task_queues = [
    Queue("celery", Exchange("celery"), "celery"),
    Queue("routed", Exchange("routed", type="topic"), "routed.#"),
]
app.conf.broker_transport_options = {"polling_interval": 0.02}
app.conf.task_default_queue = "celery"

away = Celery("outbox-tests-away", broker="redis://127.0.0.1:1/0", backend="redis://127.0.0.1:1/1", set_as_current=False)


@app.task(name="tests.add", shared=False)
def add(x: int, y: int) -> int:
    return x + y


@app.task(name="tests.routed", routing_key="routed.now", shared=False)
def routed(**values: object) -> None: ...


@app.task(name="tests.limited", time_limit=20, soft_time_limit=10, ignore_result=True, priority=3, expires=100, shared=False)
def limited() -> None: ...


@app.task(name="tests.parent", bind=True, shared=False)
def parent(self, number: int) -> None: ...


@away.task(name="tests.far", shared=False)
def far(number: int) -> None: ...
