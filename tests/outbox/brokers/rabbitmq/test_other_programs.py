"""Programs without any code of ours, with plain py-amqp, that publish to our topics and read from them."""

import json
import uuid
from collections.abc import Callable
from contextlib import closing
from typing import Any

import amqp
import pytest
from django.contrib.auth import get_user_model
from django.db.models import Model

from outbox import atomic, conf, database, publish, publish_raw
from outbox.consuming import register
from outbox.consuming.worker import Worker
from outbox.message import Cause, current_cause
from outbox.models import Deferred
from outbox.relay.rounds import Relay
from outbox.topics import write_topics
from project.servers.rabbitmq import RabbitMQ
from tests.outbox.brokers.messages_page import names, require_all, require_described, type_of
from tests.waiting import wait_until

pytestmark = [pytest.mark.django_db, pytest.mark.rabbitmq, pytest.mark.usefixtures("no_consumers", "own_types")]

JSON = "application/json"

Publish = Callable[..., None]


@pytest.fixture
def topic(settings: Any, node: RabbitMQ) -> str:
    """A topic of ours, of the group "cart"."""
    name = f"orders-{uuid.uuid4().hex[:8]}"
    options = {"NODES": [node.address], "GROUPS": {name: ["cart"]}}
    settings.OUTBOX = {
        **settings.OUTBOX,
        "BROKERS": {"default": {"BACKEND": "outbox.brokers.rabbitmq.RabbitMQBroker", "OPTIONS": options}},
        "TOPICS": {name: {}},
    }
    write_topics("default")
    return name


@pytest.fixture
def handle(topic: str) -> Callable[[], Any]:
    """Handle all that waits; return the counts."""

    def handle() -> Any:
        with closing(Worker(register.group("cart"), "default")) as worker:
            return worker.run(until_idle=True)

    return handle


@pytest.fixture
def theirs(topic: str, seen: list[Any], handle: Callable[[], Any], channel: amqp.Channel) -> Publish:
    """Publish as another program, to a topic whose queues are there."""
    handle()

    def publish(body: bytes | str = b'{"n": 1}', *, tag: str = "", headers: dict[str, Any] | None = None, **fields: Any) -> None:
        message = amqp.Message(body, delivery_mode=2, application_headers=headers or {}, **fields)
        channel.basic_publish(message, topic, tag, mandatory=True)

    return publish


@pytest.fixture
def orders() -> Callable[[], Model]:
    """Make a row for a message to be about."""
    return lambda: get_user_model().objects.create(username=uuid.uuid4().hex)


@pytest.fixture
def ours(topic: str, channel: amqp.Channel) -> Callable[[], list[amqp.Message]]:
    """Relay what was published; return what came to a queue that another program has bound."""
    channel.exchange_declare(topic, "topic", durable=True, auto_delete=False)
    queue = channel.queue_declare("", exclusive=True).queue
    channel.queue_bind(queue, topic, "#")

    def relayed() -> list[amqp.Message]:
        with closing(conf.make_broker("default")) as broker:
            sent = Relay(database.raw("default"), broker, 1).drain().sent
        return [wait_until(lambda: channel.basic_get(queue, no_ack=True)) for _ in range(sent)]

    return relayed


class TestTheirMessage:
    def test_needs_an_id_and_no_more(self, theirs, handle, seen):
        theirs(b"plain", message_id="a-1")

        counts = handle()

        [(message, context)] = seen
        assert counts.handled == 1
        assert (message, context.message_id, context.source, context.key, context.tag) == (b"plain", "a-1", "", "", "")

    def test_is_decoded_by_the_content_type_of_amqp(self, theirs, handle, seen):
        theirs(b'{"n": 7}', message_id="a-1", content_type=JSON)

        handle()

        [(message, _)] = seen
        assert message == {"n": 7}

    def test_may_have_all_that_ours_have(self, theirs, handle, seen_typed):
        headers = {
            "ce-id": "a-1",
            "ce-source": "https://shipping.example",
            "ce-type": "shop.OrderPlaced",
            "ce-subject": "4711",
            "ce-correlationid": "c-9",
            "x-tenant": "eu",
        }
        theirs(b'{"order_id": 4711}', tag="shipped", headers=headers, content_type=JSON)

        handle()

        require_all(seen_typed)

    def test_is_identified_by_source_and_id(self, theirs, handle, seen):
        for source in ("shipping", "billing", "shipping"):
            theirs(source.encode(), message_id="1", headers={"ce-source": source})

        counts = handle()

        assert (counts.handled, counts.duplicates) == (2, 1)
        assert sorted(message for message, _ in seen) == [b"billing", b"shipping"]

    def test_without_a_source_is_identified_by_its_id(self, theirs, handle, seen):
        for number in ("1", "2", "1"):
            theirs(number.encode(), message_id=number)

        counts = handle()

        assert (counts.handled, counts.duplicates) == (2, 1)

    def test_without_an_id_becomes_a_dead_letter_and_the_group_goes_on(self, theirs, handle, seen):
        theirs(b"first")
        theirs(b"second")
        theirs(b"third", message_id="3")

        handle()

        errors = list(Deferred.objects.exclude(dead_at=None).values_list("error", flat=True))
        assert [message for message, _ in seen] == [b"third"]
        assert len(errors) == 2
        assert all("has no message id" in error for error in errors)

    def test_whose_body_cannot_be_read_becomes_a_dead_letter_and_the_group_goes_on(self, theirs, handle, seen):
        theirs(b"{", message_id="1", content_type=JSON)
        theirs(b"\xff\x00", message_id="2", content_type=JSON)
        theirs(b"{}", message_id="3", content_type=JSON)

        handle()

        errors = dict(Deferred.objects.exclude(dead_at=None).values_list("own_id", "error"))
        assert [message for message, _ in seen] == [{}]
        assert sorted(errors) == ["1", "2"]
        assert all("has a JSON content type, but is not valid JSON" in error for error in errors.values())

    def test_whose_headers_cannot_be_read_is_handled_without_them(self, theirs, handle, seen):
        headers = {
            "ce-lane": "many",
            "ce-number": 2**62,
            "ce-time": "yesterday",
            "ce-source": "a\0b",
            "x-delivery-count": "often",
            "outbox-stored-at": -(2**62),
            "traceparent": "00-nothing",
            "nested": {"a": [1, None, b"\xff"]},
        }
        theirs(message_id="1", headers=headers)

        counts = handle()

        assert (counts.handled, len(seen)) == (1, 1)

    @pytest.mark.parametrize(("body", "encoding"), [(b"\xe9", "latin-1"), (b"a\\ud800", "unicode_escape"), (b"+2AA-", "utf-7")])
    def test_keeps_its_bytes_whatever_encoding_it_names(self, theirs, handle, seen, body, encoding):
        theirs(body, message_id="1", content_encoding=encoding)
        theirs(b"next", message_id="2")

        handle()

        assert [message for message, _ in seen] == [body, b"next"]


class TestOurMessage:
    def test_is_on_the_wire_as_the_page_says(self, topic, ours, orders):
        kind = type_of(topic)
        cause = current_cause.set(Cause("a-1", "c-9"))
        with atomic():
            order = orders()
            publish(kind(order_id=4711), about=order, headers={"traceparent": f"00-{'1' * 32}-{'2' * 16}-01", "x-tenant": "eu"})
            publish_raw(topic, b"plain")
        current_cause.reset(cause)

        typed, plain = ours()

        headers = typed.headers
        assert {*headers, *plain.headers} - {"x-tenant"} == names("Ours") - {"ce-token", "ce-deliverat"} | {
            name for name in names("On RabbitMQ") if name.startswith("outbox-")
        }
        assert {*typed.properties, "routing_key"} == {name for name in names("On RabbitMQ") if not name.startswith("outbox-")}
        assert json.loads(typed.body) == {"order_id": 4711}
        assert (typed.delivery_info["routing_key"], headers["outbox-tag"], headers["outbox-key"]) == ("placed", "placed", "4711")
        assert (typed.properties["message_id"], typed.properties["content_type"]) == (headers["ce-id"], JSON)
        assert (headers["ce-type"], headers["ce-subject"], headers["x-tenant"]) == ("shop.OrderPlaced", "4711", "eu")
        assert "ce-type" not in plain.headers
        assert bytes(plain.body) == b"plain"

    def test_is_as_the_asyncapi_document_describes_it(self, topic, ours):
        with atomic():
            publish(type_of(topic)(order_id=4711))

        [message] = ours()

        require_described("shop.OrderPlaced", message.headers, message.body)
