"""What an AsyncAPI document says about RabbitMQ. Needs no server."""

import pytest

from outbox.brokers.base import Outgoing
from outbox.brokers.rabbitmq import RabbitMQBroker
from outbox.brokers.rabbitmq.envelope import to_amqp
from outbox.message import TopicSpec, TopicType

OPTIONS = {"NODES": ["rabbit-1"]}


class TestTheInterface:
    @pytest.mark.parametrize(
        ("more", "server"),
        [
            ({}, ("amqp", "rabbit-1:5672", "/%2F")),
            ({"TLS": True, "VIRTUAL_HOST": "shop"}, ("amqps", "rabbit-1:5671", "/shop")),
        ],
    )
    def test_names_nodes_protocol_and_virtual_host(self, more, server):
        found = RabbitMQBroker.interface.of({**OPTIONS, **more})

        assert (found.protocol, *found.hosts, found.pathname) == server

    def test_has_the_headers_that_messages_have_beside_ours(self):
        sent = to_amqp(Outgoing("m", "orders", b"", headers={"ce-id": "m"}))

        assert {"ce-id", *RabbitMQBroker.interface.of(OPTIONS).more_headers()} == set(sent.application_headers)

    def test_leads_readers_to_the_exchange(self):
        found = RabbitMQBroker.interface.of(OPTIONS)

        assert "Bind a queue of your own" in found.how_to_read(TopicSpec("orders", TopicType.NORMAL))
