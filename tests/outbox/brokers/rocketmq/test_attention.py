"""What needs attention where the broker is a server: frozen, killed, with dead letters and a backlog of its own."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

import pytest

from outbox import consumer, database
from outbox.brokers.base import Broker
from outbox.database import heartbeats
from outbox.message import TopicType
from outbox.monitoring.attention import read_attention
from outbox.monitoring.groups import ANSWER_WITHIN_SECONDS
from project.servers.rocketmq import RocketMQ
from tests.contracts.acts import Acts
from tests.contracts.rocketmq import RocketMQHarness
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

Read = Callable[[], dict[str, str]]


@pytest.fixture
def group(server: RocketMQ) -> str:
    name = f"watched-{uuid.uuid4().hex[:8]}"
    server.make_group(name)
    return name


@pytest.fixture
def read(topic: object, harness: RocketMQHarness, group: str, no_consumers: None) -> Read:
    """A relay and a consumer live; read what needs attention: kind -> cause."""
    consumer(topic=harness.topic(TopicType.NORMAL), group=group)(lambda message, context: None)

    def read() -> dict[str, str]:
        connection = database.raw("default")
        heartbeats.beat(connection, "relay", broker="default")
        heartbeats.beat(connection, "consumer", broker="default", consumer_group=group)
        return {one.kind: one.cause for one in read_attention(connection, "default")}

    return read


def test_a_frozen_broker_is_named_within_seconds_and_goes_away(read: Read, server: RocketMQ):
    assert read() == {}

    with server.frozen_broker():
        began = time.monotonic()
        found = read()
        took = time.monotonic() - began

    assert list(found) == ["broker_away"]
    assert took < ANSWER_WITHIN_SECONDS + 5
    wait_until(lambda: read() == {}, 60)


def test_a_killed_broker_is_named_and_goes_away(read: Read, server: RocketMQ):
    server.kill_broker()

    assert list(read()) == ["broker_away"]

    server.start_broker()
    wait_until(lambda: read() == {}, 120)


def test_dead_letters_are_named_until_they_are_discarded(read: Read, group: str, acts: Acts, broker: Broker):
    acts.send_bodies(b"poison")
    [delivery] = acts.receive(group=group)
    broker.dead_letter(delivery, "cannot be read")

    cause = wait_until(lambda: read().get("dead_letters"), 30)

    assert cause.endswith("failed for good.")
    [letter] = acts.dead_letters(group, count=1)
    broker.discard(group, [letter.id])
    wait_until(lambda: read() == {}, 30)
