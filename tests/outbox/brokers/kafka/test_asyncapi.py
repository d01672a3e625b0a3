"""What an AsyncAPI document says about Kafka."""

from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest

from outbox import atomic, conf, database, publish
from outbox.brokers.base import Outgoing
from outbox.brokers.kafka import KafkaBroker
from outbox.brokers.kafka.codec import record_headers, text_of
from outbox.message import Header, TopicSpec, TopicType
from outbox.relay.rounds import Relay
from tests.kafka_node import server
from tests.outbox.brokers.kafka.cluster import create_topic, read
from tests.outbox.brokers.messages_page import require_described, type_of

SERVERS = {"SERVERS": ["kafka-1:9092", "kafka-2:9092"]}
ORDERS = TopicSpec("orders", TopicType.FIFO, queues=12, retention=timedelta(days=1))


class TestTheInterface:
    @pytest.mark.parametrize(
        ("protocol", "client"),
        [
            ("kafka", {}),
            ("kafka", {"security.protocol": "SASL_PLAINTEXT"}),
            ("kafka-secure", {"security.protocol": "ssl"}),
            ("kafka-secure", {"security.protocol": "SASL_SSL"}),
        ],
    )
    def test_names_servers_and_protocol(self, protocol: str, client: dict[str, Any]):
        found = KafkaBroker.interface.of({**SERVERS, "CLIENT": client})

        assert (found.protocol, found.hosts) == (protocol, ["kafka-1:9092", "kafka-2:9092"])

    def test_binds_a_topic_a_key_and_a_group(self):
        found = KafkaBroker.interface.of(SERVERS)

        assert found.channel(ORDERS)["bindings"]["kafka"] == {
            "topic": "orders",
            "partitions": 12,
            "topicConfiguration": {"retention.ms": 86_400_000},
            "bindingVersion": "0.5.0",
        }
        assert found.message("invoice")["kafka"]["key"]["type"] == "string"
        assert found.message("") == {}
        assert found.receive("cart")["kafka"]["groupId"] == {"type": "string", "const": "cart"}

    def test_has_the_names_that_headers_have_in_records(self):
        message = Outgoing("m", "orders", b"", headers={Header.ID: "m", Header.CONTENT_TYPE: "application/json"})

        names = [KafkaBroker.interface.of(SERVERS).header_name(name) for name in message.headers]

        assert names == [name for name, _ in record_headers(message)] == ["ce_id", "content-type"]

    def test_has_readers_leave_out_what_was_not_committed(self):
        assert "read_committed" in KafkaBroker.interface.of(SERVERS).how_to_read(ORDERS)
        assert KafkaBroker.interface.of({**SERVERS, "TRANSACTIONS": False}).how_to_read(ORDERS) == ""


@pytest.mark.kafka
@pytest.mark.django_db
@pytest.mark.timeout(120)
class TestAMessage:
    def test_is_as_the_document_describes_it(self, monkeypatch, settings):
        monkeypatch.setattr("outbox.message.registered", {})
        monkeypatch.setattr("outbox.consuming.register.registered", {})
        topic = create_topic()
        broker = {"BACKEND": "outbox.brokers.kafka.KafkaBroker", "OPTIONS": {"SERVERS": [server().address]}}
        settings.OUTBOX = {**settings.OUTBOX, "BROKERS": {"default": broker}, "TOPICS": {topic: {}}}
        with atomic():
            publish(type_of(topic)(order_id=4711))
        with closing(conf.make_broker("default")) as made:
            Relay(database.raw("default"), made, 1).drain()

        [record] = read(topic)

        require_described("shop.OrderPlaced", {name: text_of(value) for name, value in record.headers()}, record.value())
