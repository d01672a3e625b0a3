"""A real server stores what comes to a broker's own port as it stores what comes through the proxy."""

from typing import Any

import pytest

from outbox.brokers.base import Broker, HalfRef, Outgoing
from outbox.brokers.rocketmq.places import HALVES
from outbox.brokers.rocketmq.remoting.frames import StoredMessage
from outbox.message import COMMIT, TopicType
from project.servers.remoting import query
from project.servers.rocketmq import RocketMQ
from tests.contracts.acts import Acts
from tests.contracts.rocketmq import RocketMQHarness
from tests.waiting import wait_until

# Of each message its own, and what each way says of its sender. The proxy notes that nobody has read it yet; that is known
# without.
OWN = {"UNIQ_KEY", "KEYS", "BORN_TIMESTAMP", "__BORNHOST", "outbox-token", "__transactionId__", "REAL_QID", "RECONSUME_TIME"}

FIELDS: dict[str, Any] = {"key": "4711", "tag": "placed", "headers": {"ce-type": "order", "who": "Zoë\x00"}}


def stored(server: RocketMQ, topic: str, message_id: str) -> StoredMessage:
    found = wait_until(lambda: query(server.broker_address, topic, message_id))
    assert len({one.id for one in found}) == 1  # found twice where two of its keys are its id
    return found[0]


def what_counts(one: StoredMessage) -> tuple[dict[str, str], bytes, int]:
    properties = {name: text for name, text in one.properties.items() if name not in OWN}
    return properties, one.body, one.flag & (0b111 << 8 | 0b1101)  # compression, and the kind of a transaction's message


class TestStoredAlike:
    @pytest.fixture
    def ways(self, harness: RocketMQHarness) -> list[Broker]:
        return [
            harness.open(COMPRESS_ABOVE_BYTES=100),
            harness.open(COMPRESS_ABOVE_BYTES=100, NAME_SERVERS=[], UNCONFIRMED_ENDS=True),
        ]

    def message(self, harness: RocketMQHarness, kind: TopicType, body: bytes) -> Outgoing:
        return Acts(harness, harness.open()).message(kind, body=body, **FIELDS)

    @pytest.mark.parametrize("body", [b"{}", b"an order, and again " * 100], ids=["short", "compressed"])
    def test_half_messages_and_what_becomes_of_them(
        self, harness: RocketMQHarness, server: RocketMQ, ways: list[Broker], body: bytes
    ):
        halves: list[StoredMessage] = []
        messages: list[StoredMessage] = []
        for broker in ways:
            message = self.message(harness, TopicType.TRANSACTION, body)
            [sent] = broker.send_halves([message])
            halves.append(stored(server, HALVES, message.message_id))
            broker.end([HalfRef(message.topic, sent.half_id, message.message_id, sent.place)], COMMIT)
            messages.append(stored(server, message.topic, message.message_id))

        assert what_counts(halves[0]) == what_counts(halves[1])
        assert what_counts(messages[0]) == what_counts(messages[1])

    def test_messages(self, harness: RocketMQHarness, server: RocketMQ, ways: list[Broker]):
        found: list[StoredMessage] = []
        for broker in ways:
            message = self.message(harness, TopicType.NORMAL, b"{}")
            broker.send([message])
            found.append(stored(server, message.topic, message.message_id))

        assert what_counts(found[0]) == what_counts(found[1])
