"""Messages that AMQP cannot carry, and those of other producers."""

import struct
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import amqp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.brokers.base import Delivery, Outgoing, SendStatus
from outbox.brokers.confirms import WRITE_BYTES
from outbox.brokers.rabbitmq.envelope import KEY, STORED_AT, TAG, dead_letter, time_of
from tests.outbox.brokers.rabbitmq.acts import received
from tests.outbox.brokers.rabbitmq.conftest import HELD
from tests.outbox.brokers.rabbitmq.raw_frames import publish_bytes
from tests.rabbitmq_node import socket_writes
from tests.waiting import wait_until

pytestmark = pytest.mark.rabbitmq

NewMessage = Callable[..., Outgoing]


class TestTooLong:
    @pytest.mark.parametrize(
        ("fields", "text"),
        [
            ({"tag": "t" * 256}, "The tag has 256 bytes"),
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


class TestMessageThatPyAmqpCannotRead:
    """Written as bytes, since py-amqp does not write them either."""

    @pytest.mark.parametrize("body", [b"theirs", b""])
    @pytest.mark.parametrize(
        ("flags", "properties"),
        [
            (0x0080, b"\x02\xff\xfe"),
            (0x8000, b"\x02\xff\xfe"),
            (0x0008, b"\x01\xff"),
            (0x2000, struct.pack(">I", 11) + b"\x01aT" + struct.pack(">Q", 1_700_000_000_000_000)),
        ],
        ids=["message_id", "content_type", "app_id", "time in a header"],
    )
    def test_is_received_with_its_properties_in_a_header_and_holds_up_no_others(
        self, broker, channel: amqp.Channel, message: NewMessage, topic, flags, properties, body
    ):
        broker.receive("billing", [topic], limit=1, invisible_for=HELD, wait=timedelta())
        publish_bytes(channel, topic, flags, properties, body)
        ours = message(b"ours")
        broker.send([ours])
        found: list[Delivery] = []

        wait_until(lambda: found.extend(received(broker, topic)) or len(found) == 2)

        assert [(one.message_id, one.body) for one in found] == [("", body), (ours.message_id, b"ours")]
        assert repr(struct.pack(">H", flags) + properties) in found[0].headers["outbox-unreadable"]
        assert broker.ack(found) == [True, True]

    def test_may_have_a_routing_key_that_is_not_utf_8(self, broker, channel: amqp.Channel, topic):
        broker.receive("billing", [topic], limit=1, invisible_for=HELD, wait=timedelta())
        publish_bytes(channel, topic, 0, b"", b"theirs", routing_key=b"\xff" * 255)

        [found] = wait_until(lambda: received(broker, topic))

        assert (found.body, set(found.tag)) == (b"theirs", {"\N{REPLACEMENT CHARACTER}"})


class TestHeadersOfAnotherProducer:
    @given(
        headers=st.dictionaries(
            st.text(max_size=20) | st.binary(max_size=20) | st.sampled_from([KEY, TAG, STORED_AT, "x-death", "x-delivery-count"]),
            st.none()
            | st.integers()
            | st.floats()
            | st.text()
            | st.binary()
            | st.lists(st.text() | st.dictionaries(st.text(), st.text())),
            max_size=5,
        ),
        message_id=st.text() | st.integers(),
    )
    def test_are_read_whatever_they_are(self, headers: dict[Any, Any], message_id: Any):
        message = amqp.Message(b"", application_headers=headers, message_id=message_id)
        message.delivery_info = {"redelivered": False, "routing_key": ""}

        found = dead_letter(message, group="billing", topic="orders", queue="orders:billing")

        assert found.delivery_count >= 1
        for text in (found.message_id, found.key, found.tag, *found.headers, *found.headers.values()):
            text.encode()
