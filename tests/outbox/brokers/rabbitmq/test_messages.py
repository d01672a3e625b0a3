"""Messages that AMQP cannot carry, and those of other producers."""

from collections.abc import Callable
from datetime import timedelta

import amqp
import pytest

from outbox.brokers.base import Outgoing, SendStatus
from outbox.brokers.confirms import WRITE_BYTES
from outbox.brokers.rabbitmq.envelope import time_of
from tests.outbox.brokers.rabbitmq.conftest import HELD
from tests.rabbitmq_node import socket_writes

pytestmark = pytest.mark.rabbitmq

NewMessage = Callable[..., Outgoing]


class TestTooLong:
    @pytest.mark.parametrize(
        ("fields", "text"),
        [
            ({"tag": "t" * 250}, "The tag has 250 bytes"),
            ({"headers": {"h" * 300: "a"}}, "more than 255 bytes"),
            ({"headers": {"who": "a" * 120_000}}, "Headers and key have"),
        ],
        ids=["tag", "name", "headers"],
    )
    def test_is_refused_with_a_reason_and_its_neighbour_taken(self, broker, message: NewMessage, fields, text):
        refused, taken = broker.send([message(**fields), message()])

        assert refused.status is SendStatus.REFUSED
        assert text in refused.reason
        assert taken.status is SendStatus.ACCEPTED


class TestBatch:
    def test_is_written_to_the_socket_in_few_pieces(self, broker, message: NewMessage):
        with socket_writes() as writes:
            broker.send([message()])  # so that the topic is there

            writes.clear()
            results = broker.send([message() for _ in range(500)])

        assert {one.status for one in results} == {SendStatus.ACCEPTED}
        assert len(writes) <= 2 + sum(writes) // WRITE_BYTES


class TestHeaders:
    def test_of_users_are_kept_whatever_they_begin_with(self, broker, message: NewMessage, topic):
        headers = {"x-request-id": "47", "x-tenant": "shop"}
        broker.send([message(headers=headers)])

        [delivery] = broker.receive("billing", [topic], limit=1, invisible_for=HELD, wait=timedelta(seconds=5))
        broker.release([delivery])
        [again] = broker.receive("billing", [topic], limit=1, invisible_for=HELD, wait=timedelta(seconds=5))

        assert delivery.headers == again.headers == headers


class TestOtherProducers:
    def test_are_read_as_far_as_their_messages_go(self, broker, channel: amqp.Channel, message: NewMessage, topic):
        broker.send([message()])  # so that the topic is there
        headers = {"shop": "Köln", "size": 3}
        channel.basic_publish(amqp.Message(b"theirs", application_headers=headers), topic, "placed")
        channel.basic_publish(amqp.Message("text"), topic, "")

        found = broker.receive("billing", [topic], limit=9, invisible_for=HELD, wait=timedelta(seconds=5))
        by_body = {one.body: one for one in found}
        first, second = by_body[b"text"], by_body[b"theirs"]

        assert (first.body, first.tag, first.headers) == (b"text", "", {})
        assert (second.body, second.tag, second.headers) == (b"theirs", "placed", {"shop": "Köln", "size": "3"})
        assert (second.message_id, second.stored_at, len(found)) == ("", None, 3)


class TestOtherConsumers:
    def test_may_bind_a_queue_to_a_tag(self, broker, channel: amqp.Channel, message: NewMessage, topic):
        broker.send([message()])
        queue = channel.queue_declare("", exclusive=True).queue
        channel.queue_bind(queue, topic, "placed")

        broker.send([message(b"a", tag="placed"), message(b"b", tag="cancelled")])

        found = [channel.basic_get(queue) for _ in range(2)]
        assert [one and bytes(one.body) for one in found] == [b"a", None]


class TestTimeOfAnotherProducer:
    @pytest.mark.parametrize("value", [2**63 - 1, -(2**62), "yesterday", 1.5, None, b"x"], ids=str)
    def test_is_none_where_it_cannot_be_read(self, value):
        assert time_of(value) is None
