"""Programs without any code of ours, with RocketMQ's own client, that publish to our topics and read from them."""

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from outbox import atomic, conf, database, publish, publish_raw
from outbox.brokers.rocketmq import RocketMQBroker  # before the client, whose log it replaces
from outbox.message import Cause, TopicType, current_cause
from outbox.models import Deferred
from outbox.relay.rounds import Relay
from outbox.topics import write_topics
from project.servers.remoting import query
from project.servers.rocketmq import RocketMQ
from tests.outbox.brokers.messages_page import names, require_all, type_of
from tests.waiting import wait_until

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("no_consumers", "own_types")]

JSON = {"content-type": "application/json"}


@pytest.fixture(params=[TopicType.NORMAL, TopicType.TRANSACTION])
def kind(request: pytest.FixtureRequest) -> TopicType:
    return request.param


@pytest.fixture
def topic(settings: Any, server: RocketMQ, kind: TopicType) -> str:
    """A topic of ours, which the group "cart" consumes."""
    name = f"orders-{uuid.uuid4().hex[:8]}"
    server.make_topic(name, kind)
    options = {"ENDPOINTS": server.endpoints, "NAME_SERVERS": [server.name_server], "COMMIT_WINDOW": "PT30S"}
    settings.OUTBOX = {
        **settings.OUTBOX,
        "BROKERS": {"default": {"BACKEND": f"{RocketMQBroker.__module__}.RocketMQBroker", "OPTIONS": options}},
        "TOPICS": {name: {"TYPE": str(kind)}},
    }
    write_topics("default")
    return name


@pytest.fixture
def theirs(server: RocketMQ, topic: str) -> Iterator[Callable[..., None]]:
    """Publish as another program."""
    from rocketmq.v5.client.client_configuration import ClientConfiguration, Credentials
    from rocketmq.v5.model.message import Message
    from rocketmq.v5.producer.producer import Producer

    producer = Producer(ClientConfiguration(server.endpoints, Credentials()), [topic])
    producer.startup()

    def publish(body: bytes, *, tag: str = "", **properties: str) -> None:
        message = Message()
        message.topic = topic
        message.body = body
        if tag:
            message.tag = tag
        for name, value in properties.items():
            message.add_property(name.replace("_", "-"), value)
        producer.send(message)

    yield publish
    producer.shutdown()


@pytest.fixture
def read(server: RocketMQ, topic: str) -> Iterator[Callable[[int], list[Any]]]:
    """Receive so many messages as another program, with a group of its own."""
    from rocketmq.v5.client.client_configuration import ClientConfiguration, Credentials
    from rocketmq.v5.consumer.simple.simple_consumer import SimpleConsumer
    from rocketmq.v5.model.filter_expression import FilterExpression

    client = SimpleConsumer(ClientConfiguration(server.endpoints, Credentials()), "other", {topic: FilterExpression()})
    client.startup()

    def read(count: int) -> list[Any]:
        found: list[Any] = []

        def receive() -> bool:
            for message in client.receive(32, 30):
                client.ack(message)
                found.append(message)
            return len(found) >= count

        wait_until(receive, 60)
        return found

    yield read
    client.shutdown()


@pytest.mark.parametrize("kind", [TopicType.NORMAL], indirect=True)
class TestTheirMessage:
    def test_needs_nothing(self, theirs, handle_until, seen):
        theirs(b"plain")

        handle_until(lambda _: seen)

        [(message, context)] = seen
        assert message == b"plain"
        assert (context.message_id != "", context.source, context.key, context.tag) == (True, "", "", "")

    def test_may_have_all_that_ours_have(self, theirs, handle_until, seen_typed):
        headers = {"ce_id": "a-1", "ce_source": "https://shipping.example", "ce_type": "shop.OrderPlaced", "ce_subject": "4711"}
        theirs(b'{"order_id": 4711}', tag="shipped", **headers, **JSON, x_tenant="eu")

        handle_until(lambda _: seen_typed)

        require_all(seen_typed)

    def test_is_identified_by_source_and_id(self, theirs, handle_until, seen):
        for source in ("shipping", "billing", "shipping"):
            theirs(source.encode(), ce_id="1", ce_source=source)
        theirs(b"last", ce_id="2")

        counts = handle_until(lambda counts: counts.handled + counts.duplicates == 4)

        assert sorted(message for message, _ in seen) == [b"billing", b"last", b"shipping"]
        assert counts.duplicates == 1

    def test_that_cannot_be_read_becomes_a_dead_letter_or_is_handled_and_the_group_goes_on(self, theirs, handle_until, seen):
        theirs(b"{", ce_id="1", **JSON)
        theirs(b"odd", ce_id="2", outbox_headers="{no JSON", ce_lane="many", ce_number=str(2**70))
        theirs(b"{}", ce_id="3", **JSON)

        dead = Deferred.objects.filter(dead_at__isnull=False)
        handle_until(lambda _: len(seen) == 2 and dead.exists())

        assert dead.get().own_id == "1"
        assert "has a JSON content type, but is not valid JSON" in dead.get().error
        assert sorted(context.message_id for _, context in seen) == ["2", "3"]


class TestOurMessage:
    def test_is_on_the_wire_as_the_page_says(self, topic, kind, server, read, django_user_model):
        made = type_of(topic)
        cause = current_cause.set(Cause("a-1", "c-9"))
        with atomic():
            order = django_user_model.objects.create(username=uuid.uuid4().hex)
            trace = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}
            receipt = publish(made(order_id=4711), about=order, headers={**trace, "X-Tenant": "eu"})
            publish_raw(topic, b"plain")
        current_cause.reset(cause)
        with closing(conf.make_broker("default")) as broker:
            Relay(database.raw("default"), broker, 1).drain()

        typed, plain = sorted(read(2), key=lambda one: len(one.properties), reverse=True)

        token = {"ce-token"} if kind is TopicType.TRANSACTION else set()
        absent = {"ce-deliverat", "ce-token"} - token
        headers = {name for name in {**typed.properties, **plain.properties} if name.startswith(("ce-", "content", "trace"))}
        assert headers == names("Ours") - absent
        assert json.loads(typed.properties["outbox-headers"]) == {"X-Tenant": "eu"}
        assert (json.loads(typed.body), typed.tag, typed.keys) == (
            {"order_id": 4711},
            "placed",
            {str(receipt.message_id), "4711"},
        )
        assert (plain.body, "ce-type" in plain.properties) == (b"plain", False)
        [stored, *_] = query(server.broker_address, topic, str(receipt.message_id))
        assert names("On RocketMQ") <= stored.properties.keys()
