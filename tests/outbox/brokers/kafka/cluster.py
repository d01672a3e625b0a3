"""What tests ask of the real Kafka: topics, all records that readers of committed messages see, and clients of the broker."""

import time
import uuid
from collections.abc import Mapping
from typing import Any

from confluent_kafka import Consumer, Message, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from outbox.brokers.base import Outgoing
from outbox.brokers.kafka import KafkaBroker
from outbox.message import TopicSpec, TopicType
from tests.kafka_node import server
from tests.waiting import wait_until

QUIET = {"log_level": 0, "error_cb": lambda error: None}
SECONDS = 30


def new_source() -> str:
    return f"urn:uuid:{uuid.uuid4()}"


def create_topic(
    name: str = "", *, partitions: int = 1, replicas: int = -1, config: Mapping[str, str] | None = None, at: str = ""
) -> str:
    name = name or f"orders-{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": at or server().address, **QUIET})
    for created in admin.create_topics([NewTopic(name, partitions, replicas, config=dict(config or {}))]).values():
        created.result(SECONDS)
    wait_until(lambda: name in admin.list_topics(timeout=SECONDS).topics)  # the node learns of it from the controller
    return name


def delete_topic(name: str) -> None:
    admin = AdminClient({"bootstrap.servers": server().address, **QUIET})
    for deleted in admin.delete_topics([name]).values():
        deleted.result(SECONDS)


def open_broker(*topics: str, kind: TopicType = TopicType.NORMAL, **options: Any) -> KafkaBroker:
    options = {"SERVERS": [server().address], **options}
    return KafkaBroker("default", options, [TopicSpec(topic, kind) for topic in topics])


def message(topic: str, body: bytes = b"{}", **fields: Any) -> Outgoing:
    return Outgoing(str(uuid.uuid4()), topic, body, **fields)


def read(topic: str, *, at: str = "") -> list[Message]:
    """Return all records of a topic that a reader of committed messages sees, up to its end now."""
    address = at or server().address
    admin = AdminClient({"bootstrap.servers": address, **QUIET})
    partitions = admin.list_topics(topic, timeout=SECONDS).topics[topic].partitions
    return [record for number in partitions for record in _read_partition(TopicPartition(topic, number), address)]


def _read_partition(place: TopicPartition, address: str) -> list[Message]:
    # A consumer for each: after a second `assign`, `position` may be that of the first.
    consumer = Consumer({"bootstrap.servers": address, "group.id": "counts", "enable.auto.commit": False, **QUIET})
    found: list[Message] = []
    try:
        low, end = consumer.get_watermark_offsets(place, timeout=SECONDS)
        if low == end:
            return []
        consumer.assign([TopicPartition(place.topic, place.partition, low)])
        deadline = time.monotonic() + SECONDS
        while consumer.position([place])[0].offset < end:
            assert time.monotonic() < deadline, "A transaction is still open."
            record = consumer.poll(0.05)
            if record is not None and record.error() is None:
                found.append(record)
        return found
    finally:
        consumer.close()


def bodies(topic: str) -> list[bytes]:
    return [record.value() for record in read(topic)]
