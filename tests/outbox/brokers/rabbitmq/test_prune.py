"""An inbox row lives as long as its message may come again from a real RabbitMQ, as a dead letter too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from outbox import conf, consumer
from outbox.brokers.base import Outgoing
from outbox.brokers.rabbitmq import RabbitMQBroker
from outbox.brokers.rabbitmq import dead_letters as letters
from outbox.consuming import register
from outbox.consuming.dead_letters import read_letters, settle_letters
from outbox.consuming.worker import Worker
from outbox.models import Inbox
from outbox.relay.maintenance import prune
from project.servers.rabbitmq import RabbitMQ
from tests.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.rabbitmq, pytest.mark.usefixtures("no_consumers")]

LONG = timedelta(days=30)


@pytest.fixture
def topic(settings: Any, node: RabbitMQ) -> str:
    name = f"work-{uuid4().hex[:8]}"
    options = {"NODES": [node.address], "GROUPS": {name: ["cart"]}}
    settings.OUTBOX = {
        **settings.OUTBOX,
        "BROKERS": {"default": {"BACKEND": "outbox.brokers.rabbitmq.RabbitMQBroker", "OPTIONS": options}},
        "TOPICS": {name: {}},
    }
    return name


@pytest.fixture
def applied(topic: str) -> list[int]:
    """An entry for each call of the group's handler."""
    found: list[int] = []

    @consumer(topic=topic, group="cart")
    def note(message: Any, context: Any) -> None:
        found.append(len(message))

    return found


@pytest.fixture
def open_broker(topic: str) -> Iterator[Callable[[], RabbitMQBroker]]:
    opened: list[RabbitMQBroker] = []

    def open_broker() -> RabbitMQBroker:
        broker = conf.make_broker("default")
        assert isinstance(broker, RabbitMQBroker)
        opened.append(broker)
        return broker

    yield open_broker
    for broker in opened:
        broker.close()


@pytest.fixture
def worker(topic: str) -> Iterator[Worker]:
    worker = Worker(register.group("cart"), "default")
    yield worker
    worker.close()


@pytest.fixture
def letter(topic: str, applied: list[int], open_broker: Callable[[], RabbitMQBroker], worker: Worker) -> str:
    """Return the id of a dead letter whose message came again, since an acknowledgement was lost, and was handled long ago."""
    broker, dying = open_broker(), open_broker()
    broker.send([Outgoing(str(uuid4()), topic, b"1")])
    [held] = wait_until(lambda: dying.receive("cart", [topic], limit=1, invisible_for=LONG, wait=timedelta(seconds=1)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dying._held, "ack", lambda deliveries: [False])
        dying.dead_letter(held, "no such customer")
    dying.close()
    wait_until(lambda: worker.run(once=True) and worker.counts.handled)
    Inbox.objects.update(handled_at=datetime.now(UTC) - LONG)
    [letter] = wait_until(lambda: broker.dead_letters("cart"))
    assert applied == [1]
    return letter.id


def handle_again(worker: Worker) -> None:
    """Receive until the replayed message has come."""
    wait_until(lambda: worker.run(once=True) and (worker.counts.duplicates or worker.counts.handled > 1))


class TestPrune:
    def test_keeps_the_row_of_a_dead_letter_that_can_be_replayed(self, letter: str, applied: list[int], worker: Worker):
        prune("default")

        list(settle_letters(read_letters().found, by="ada"))

        handle_again(worker)
        assert applied == [1]

    def test_keeps_it_after_the_replay(self, letter: str, applied: list[int], worker: Worker):
        list(settle_letters(read_letters().found, by="ada"))

        prune("default")

        handle_again(worker)
        assert applied == [1]

    def test_deletes_it_when_the_letter_is_discarded(self, letter: str, applied: list[int]):
        list(settle_letters(read_letters().found, by="ada", discard=True))

        prune("default")

        assert not Inbox.objects.exists()

    def test_keeps_all_rows_where_there_are_more_letters_than_it_lists(self, letter: str, applied: list[int], monkeypatch):
        Inbox.objects.create(consumer_group="cart", dedupe_key="other", message_id=uuid4(), topic=Inbox.objects.get().topic)
        Inbox.objects.update(handled_at=datetime.now(UTC) - LONG)
        monkeypatch.setattr(letters, "MOST_AT_ONCE", 0)

        prune("default")

        assert Inbox.objects.count() == 2

    def test_keeps_them_while_the_server_is_away(self, letter: str, applied: list[int], node: RabbitMQ):
        node.kill()
        try:
            prune("default")
        finally:
            node.start()

        assert Inbox.objects.count() == 1
