"""What an AsyncAPI document says about Kafka. Needs no server."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from outbox.brokers.base import Outgoing
from outbox.brokers.kafka import KafkaBroker
from outbox.brokers.kafka.codec import record_headers
from outbox.message import Header, TopicSpec, TopicType

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
        found = KafkaBroker.interface({**SERVERS, "CLIENT": client})

        assert (found.protocol, found.hosts) == (protocol, ["kafka-1:9092", "kafka-2:9092"])

    def test_binds_a_topic_a_key_and_a_group(self):
        found = KafkaBroker.interface(SERVERS)

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

        names = [KafkaBroker.interface(SERVERS).header_name(name) for name in message.headers]

        assert names == [name for name, _ in record_headers(message)] == ["ce_id", "content-type"]

    def test_has_readers_leave_out_what_was_not_committed(self):
        assert "read_committed" in KafkaBroker.interface(SERVERS).how_to_read(ORDERS)
        assert KafkaBroker.interface({**SERVERS, "TRANSACTIONS": False}).how_to_read(ORDERS) == ""
