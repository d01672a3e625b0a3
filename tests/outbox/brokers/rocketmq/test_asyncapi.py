"""What an AsyncAPI document says about RocketMQ. Needs no server."""

from outbox.brokers.rocketmq import RocketMQBroker
from outbox.message import TopicSpec, TopicType

OPTIONS = {"ENDPOINTS": "proxy-1:8081;proxy-2:8081", "NAME_SERVERS": ["names-1:9876"]}
ORDERS = TopicSpec("orders", TopicType.TRANSACTION)


class TestTheInterface:
    def test_names_the_proxies_and_has_no_bindings_of_its_own(self):
        found = RocketMQBroker.interface.of(OPTIONS)

        assert (found.protocol, found.hosts) == ("rocketmq", ["proxy-1:8081", "proxy-2:8081"])
        assert found.channel(ORDERS) == {"address": "orders"}
