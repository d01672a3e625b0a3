"""What needs attention where the broker is a server: frozen or killed."""

import time
import uuid
from collections.abc import Callable

import pytest

from outbox import consumer, database
from outbox.database import heartbeats
from outbox.message import TopicType
from outbox.monitoring.attention import read_attention
from outbox.monitoring.groups import ANSWER_WITHIN_SECONDS
from project.servers.rocketmq import RocketMQ
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
        return {one.id: one.msg for one in read_attention(connection, "default")}

    return read


def test_a_frozen_broker_is_named_within_seconds_and_goes_away(read: Read, server: RocketMQ):
    assert read() == {}

    with server.frozen_broker():
        began = time.monotonic()
        found = read()
        took = time.monotonic() - began

    assert list(found) == ["outbox.broker_away"]
    assert took < ANSWER_WITHIN_SECONDS + 5
    wait_until(lambda: read() == {}, 60)


def test_a_killed_broker_is_named_and_goes_away(read: Read, server: RocketMQ):
    server.kill_broker()

    assert list(read()) == ["outbox.broker_away"]

    server.start_broker()
    wait_until(lambda: read() == {}, 120)
