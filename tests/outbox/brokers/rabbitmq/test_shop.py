"""The outbox on a real RabbitMQ, from publish() to the handlers' rows; relay and consumer in the threads of the test."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from outbox import RetryPolicy, atomic, conf, consumer, database, publish_raw
from outbox.brokers.base import Broker, Delivery, Outgoing
from outbox.consuming import register, subscriptions
from outbox.consuming.worker import Worker
from outbox.database.identity import read_identity
from outbox.message import Header, read_headers
from outbox.models import Batch, DeadMessage, InboxRow, MessageRow, State
from outbox.monitoring import doctor
from outbox.monitoring.attention import read_attention
from outbox.relay.rounds import Relay
from outbox.topics import write_topics
from project.servers.rabbitmq import RabbitMQ
from tests.waiting import wait_until

BLOG = "urn:uuid:7a0e9f0e-0000-4000-8000-00000000000b"

pytestmark = [pytest.mark.slow, pytest.mark.django_db, pytest.mark.rabbitmq, pytest.mark.usefixtures("no_consumers")]


@pytest.fixture
def names(settings: Any, node: RabbitMQ) -> tuple[str, str]:
    """Settings with a topic without order and one with order, of the group "cart"; their names."""
    unique = uuid.uuid4().hex[:8]
    work, steps = f"work-{unique}", f"steps-{unique}"
    options = {"NODES": [node.address], "GROUPS": {work: ["cart"], steps: ["cart"]}}
    settings.OUTBOX = {
        **settings.OUTBOX,
        "BROKERS": {"default": {"BACKEND": "outbox.brokers.rabbitmq.RabbitMQBroker", "OPTIONS": options}},
        "TOPICS": {work: {}, steps: {"TYPE": "fifo"}},
    }
    write_topics("default")
    return work, steps


@pytest.fixture
def topic(names: tuple[str, str]) -> str:
    return names[0]


@pytest.fixture
def relay() -> Iterator[Callable[[], int]]:
    """Relay what was published; return how many messages were sent."""
    brokers = []

    def run() -> int:
        brokers.append(conf.make_broker("default"))
        return Relay(database.raw("default"), brokers[-1], 1).drain().sent

    yield run
    for broker in brokers:
        broker.close()


@pytest.fixture
def worker() -> Iterator[Callable[[], Worker]]:
    made: list[Worker] = []

    def start() -> Worker:
        made.append(Worker(register.group("cart"), "default"))
        return made[-1]

    yield start
    for one in made:
        one.close()


def publish(topic: str, *numbers: int, key: str = "") -> None:
    with atomic():
        for number in numbers:
            publish_raw(topic, {"n": number}, key=key)


def step_until(worker: Worker, condition: Callable[[], object]) -> None:
    """Receive and handle until a condition is true; a connection that broke is opened anew."""

    def step() -> object:
        worker.run(once=True)
        return condition()

    wait_until(step)


class TestShop:
    def test_hands_every_message_to_its_handler_once(self, topic, seen, relay, worker):
        publish(topic, *range(300))
        sent = relay()
        counts = worker().run(until_idle=True)

        assert sent == counts.handled == InboxRow.objects.count() == 300
        assert sorted(message["n"] for message, _ in seen) == list(range(300))
        assert set(Batch.objects.values_list("state", flat=True)) == {State.SENT}

    def test_drops_the_copy_of_a_message_whose_confirm_was_lost(self, topic, seen, relay, worker):
        publish(topic, 1)
        relay()
        row = MessageRow.objects.get()
        headers = read_headers(row.headers) | {Header.SOURCE: read_identity(database.raw("default")).source}
        with closing(conf.make_broker("default")) as broker:
            broker.send([Outgoing(str(row.id), topic, b'{"n": 1}', headers=headers)])

        counts = worker().run(until_idle=True)

        assert (counts.handled, counts.duplicates, len(seen)) == (1, 1, 1)

    def test_keeps_the_order_of_a_key_over_a_retry(self, names, relay, worker):
        _, steps = names
        seen: dict[str, list[int]] = {"a": [], "b": []}
        failed: list[int] = []

        @consumer(topic=steps, group="cart", retry=RetryPolicy(limit=5, delays=[timedelta(seconds=1)], jitter=0))
        def note(message, context):
            if message["n"] == 2 and not failed:
                failed.append(2)
                raise ValueError("not yet")
            seen[context.key].append(message["n"])

        for number in range(5):
            publish(steps, number, key="a")
            publish(steps, number, key="b")
        relay()
        one = worker()
        step_until(one, lambda: sum(map(len, seen.values())) == 10)

        assert seen == {"a": [0, 1, 2, 3, 4], "b": [0, 1, 2, 3, 4]}
        assert failed == [2]

    def test_is_sent_when_the_server_is_back(self, topic, seen, relay, worker, node: RabbitMQ):
        publish(topic, 1)
        relay()
        wait_until(lambda: node.knows_after_crash(f"{topic}:cart"))
        node.kill()
        publish(topic, 2)
        sent_meanwhile = relay()
        node.start()
        one = worker()
        wait_until(lambda: relay() == 1)
        step_until(one, lambda: one.counts.handled == 2)

        assert sent_meanwhile == 0
        assert DeadMessage.objects.count() == 0


class TestTwoProjects:
    @pytest.fixture
    def theirs(self, topic: str) -> Iterator[Broker]:
        """Another project's client that receives for its group "cart" first."""
        with closing(conf.make_broker("default")) as broker:
            broker.set_owner("cart", BLOG, "blog")
            broker.receive("cart", [topic], limit=1, invisible_for=timedelta(minutes=1), wait=timedelta())
            yield broker

    @pytest.fixture
    def seen(self, topic: str, theirs: Broker, seen: list[Any], relay: Callable[[], int]) -> list[Any]:
        """What a handler of our group of that name has seen, to whose topic a message was sent."""
        publish(topic, 1)
        relay()
        return seen

    def test_in_one_group_are_named_and_the_second_handles_nothing(self, topic, theirs, seen, worker):
        ours = worker()
        ours.run(until_idle=True)
        subscriptions.beat(register.group("cart"), "default")

        [entry] = [one for one in read_attention(database.raw("default"), "default") if one.id == "outbox.misconfigured"]
        assert f"belongs to the outbox {BLOG}" in entry.error
        assert "outbox_consume --group cart --take-over" in entry.error
        assert f"belongs to the outbox {BLOG}" in " ".join(one.text for one in doctor.check_brokers())
        assert seen == []
        assert [one.body for one in receive_as(theirs, topic)] == [b'{"n":1}']

    def test_are_one_after_a_take_over(self, theirs, seen, worker):
        theirs.close()

        call_command("outbox_consume", group=["cart"], take_over=True)
        worker().run(until_idle=True)

        assert len(seen) == 1

    def test_stay_two_where_the_tables_here_are_another_projects(self, topic, seen, theirs):
        database.raw("default").execute("UPDATE outbox_source SET project = 'market'")

        with pytest.raises(CommandError, match="belong to the project 'market'"):
            call_command("outbox_consume", group=["cart"], take_over=True)

        with closing(conf.make_broker("default")) as third:
            third.set_owner("cart", "urn:uuid:7a0e9f0e-0000-4000-8000-00000000000c", "third")
            assert receive_as(third, topic, wait=timedelta()) == []
            assert f"belongs to the outbox {BLOG}" in third.refusals[topic]

    def test_are_not_taken_over_without_the_name_of_a_group(self, names):
        with pytest.raises(CommandError, match="--take-over needs --group"):
            call_command("outbox_consume", take_over=True)


def receive_as(broker: Broker, topic: str, wait: timedelta = timedelta(seconds=5)) -> list[Delivery]:
    return broker.receive("cart", [topic], limit=9, invisible_for=timedelta(minutes=1), wait=wait)
