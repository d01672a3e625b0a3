"""An outbox with a Celery broker; what it stored, and what came out of Celery's broker."""

import json
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import django
import pytest
from celery import Celery, current_app

from outbox.brokers.base import Outgoing, SendResult, SendStatus
from outbox.celery import CeleryBroker
from outbox.celery.canvas import CapturingProducer, capture
from outbox.celery.stored import TOPIC, StoredTask, decode
from outbox.message import TopicSpec, TopicType
from outbox.models import MessageRow
from tests.outbox.celery.app import add
from tests.outbox.celery.app import app as tests_app

collect_ignore = ["test_django_tasks.py"] if django.VERSION < (6,) else []

OPTIONS = {"APP": "tests.outbox.celery.app.app"}


@pytest.fixture(autouse=True)
def with_tasks(settings: Any) -> None:
    tasks = {"BACKEND": "outbox.celery.CeleryBroker", "OPTIONS": OPTIONS}
    settings.OUTBOX = {**settings.OUTBOX, "BROKERS": {**settings.OUTBOX["BROKERS"], "celery": tasks}}


@pytest.fixture
def app() -> Celery:
    with tests_app.connection_for_write() as connection:  # what other tests have left in memory
        for queue in tests_app.amqp.queues.values():
            queue(connection).declare()
            queue(connection).purge()
    return tests_app


@pytest.fixture
def shared_app(app: Celery) -> Iterator[Celery]:
    """Make the app the current one, to which shared tasks belong."""
    before = current_app._get_current_object()
    app.set_current()
    yield app
    before.set_current()


@pytest.fixture
def broker(app: Celery) -> Iterator[CeleryBroker]:
    broker = CeleryBroker("celery", OPTIONS, [TopicSpec(TOPIC, TopicType.NORMAL)])
    yield broker
    broker.close()


@contextmanager
def configured(app: Celery, **settings: Any) -> Iterator[None]:
    """Change settings of Celery inside the block."""
    before = {name: app.conf[name] for name in settings}
    app.conf.update(settings)
    try:
        yield
    finally:
        app.conf.update(before)
        app.amqp._producer_pool = None  # Celery 5.5 would go on with that of another server


@contextmanager
def broker_at(url: str, **options: Any) -> Iterator[CeleryBroker]:
    """Make a broker that sends to the server at a URL."""
    with configured(tests_app, broker_url=url):
        broker = CeleryBroker("celery", {**OPTIONS, **options}, [TopicSpec(TOPIC, TopicType.NORMAL)])
        try:
            yield broker
        finally:
            broker.close()


def task(number: int = 0, queue: str = "celery", **options: Any) -> Outgoing:
    """Make what a relay hands over of a task `tests.add(number, number)`."""
    producer = CapturingProducer(tests_app)
    capture(add.s(number, number).set(queue=queue, **options), producer)
    [(_, task_id, body)] = producer.captured
    return Outgoing(uuid.uuid4().hex, TOPIC, body, task_id)


def numbers(app: Celery, queue: str = "celery") -> list[int]:
    """Return the numbers of the tasks in a queue, in their order, and empty it."""
    return [message.payload[0][0] for message in take(app, queue)]


def statuses(results: Sequence[SendResult]) -> list[SendStatus]:
    return [one.status for one in results]


def stored() -> list[StoredTask]:
    """Return the tasks in message rows, in the order in which they were sent."""
    return [decode(bytes(row.body)) for row in MessageRow.objects.order_by("id")]


def outgoing() -> list[Outgoing]:
    """Return the message rows of tasks as a relay hands them over."""
    rows = MessageRow.objects.order_by("id")
    return [Outgoing(str(row.id), TOPIC, bytes(row.body), row.key, headers=json.loads(row.headers)) for row in rows]


def through_the_outbox(broker: CeleryBroker) -> None:
    """Hand the message rows of tasks to Celery's broker."""
    assert {one.status for one in broker.send(outgoing())} == {SendStatus.ACCEPTED}


def take(app: Celery, queue: str = "celery") -> list[Any]:
    """Take all messages out of a queue of Celery's broker."""
    found = []
    with app.connection_for_read() as connection, connection.channel() as channel:
        bound = app.amqp.queues[queue](channel)
        while (message := bound.get(no_ack=True)) is not None:
            found.append(message)
    return found
