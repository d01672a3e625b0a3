"""The brokers of a soak: what its processes are told of each, and the copies that are counted at its side."""

import abc
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connection

from outbox.message import TopicType
from tests.journeys.soak.given import Names, names

QUEUES = 4

Copies = dict[str, Counter[int]]  # of each number, by topic


class Server(abc.ABC):
    """
    A broker and its topics.

    Args:
        work, later: the types of these topics.
        doubles: whether it promises each message at least once, and not once.
        asks_producers: whether it needs a checker.
    """

    backend: str
    options: dict[str, Any] = {}
    work = "normal"
    later = "normal"
    doubles = False
    asks_producers = False

    def __init__(self, unique: str) -> None:
        self.names: Names = names(unique)

    @property
    def given(self) -> dict[str, Any]:
        return {"backend": self.backend, "options": self.options, "work": self.work, "later": self.later}

    @abc.abstractmethod
    def open(self) -> None:
        """Start what is needed, and create the topics; it ends with this process."""

    def note(self) -> None:  # noqa: B027  (most keep what they have until the end)
        """Note the copies that the broker may soon delete."""

    @abc.abstractmethod
    def copies(self) -> Copies:
        """Count the copies that each topic has."""


class EmbeddedServer(Server):
    backend = "outbox.embedded.EmbeddedBroker"
    options = {"CHECK_AFTER": "PT3S", "CHECK_INTERVAL": "PT3S", "CHECK_LIMIT": 3}  # a half message is parked within RETENTION
    work = "transaction"

    NOTE = """
    INSERT INTO soak_copy SELECT m.topic_id, m.queue, m.pos, t.name, (convert_from(m.body, 'UTF8')::json ->> 'number')::bigint
    FROM outbox_embedded_message m JOIN outbox_embedded_topic t ON t.id = m.topic_id ON CONFLICT DO NOTHING
    """

    def open(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute("CREATE TABLE soak_copy (topic_id int, queue int, pos bigint, topic text, number bigint)")
            cursor.execute("ALTER TABLE soak_copy ADD PRIMARY KEY (topic_id, queue, pos)")

    def note(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute(self.NOTE)

    def copies(self) -> Copies:
        self.note()
        found: Copies = {topic: Counter() for topic in self.names[:3]}
        with connection.cursor() as cursor:
            cursor.execute("SELECT topic, number FROM soak_copy")
            for topic, number in cursor.fetchall():
                found[topic][number] += 1
        return found


class KafkaServer(Server):
    backend = "outbox.brokers.kafka.KafkaBroker"

    def open(self) -> None:
        from tests.kafka_node import server
        from tests.outbox.brokers.kafka.cluster import create_topic

        self.options = {"SERVERS": [server().address], "CLIENT": {"session.timeout.ms": 10_000}}
        for topic in self.names[:3]:
            create_topic(topic, partitions=QUEUES)

    def copies(self) -> Copies:
        from tests.outbox.brokers.kafka.cluster import read

        return {topic: Counter(json.loads(one.value())["number"] for one in read(topic)) for topic in self.names[:3]}


class RabbitMQServer(Server):
    """Counts in queues of its own, which get a copy of each message."""

    backend = "outbox.brokers.rabbitmq.RabbitMQBroker"
    doubles = True

    def open(self) -> None:
        from tests.rabbitmq_node import server

        self.address = server().address
        self.options = {"NODES": [self.address], "GROUPS": {topic: [self.names.group] for topic in self.names[:3]}}
        with self._channel() as channel:
            for topic in self.names[:3]:
                channel.exchange_declare(topic, "topic", durable=True, auto_delete=False)
                channel.queue_declare(f"tap-{topic}", durable=True, auto_delete=False, arguments={"x-queue-type": "quorum"})
                channel.queue_bind(f"tap-{topic}", topic, routing_key="#")

    def copies(self) -> Copies:
        found: Copies = {}
        with self._channel() as channel:
            for topic in self.names[:3]:
                numbers = found[topic] = Counter()
                while (one := channel.basic_get(f"tap-{topic}", no_ack=True)) is not None:
                    numbers[json.loads(one.body)["number"]] += 1
        return found

    @contextmanager
    def _channel(self) -> Iterator[Any]:
        import amqp

        with amqp.Connection(self.address) as one, one.channel() as channel:
            yield channel


class RocketMQServer(Server):
    backend = "outbox.brokers.rocketmq.RocketMQBroker"
    work = "transaction"
    later = "delay"
    doubles = True
    asks_producers = True

    def open(self) -> None:
        from tests.rocketmq_node import server

        self.node = server()
        self.options = {"ENDPOINTS": self.node.endpoints, "NAME_SERVERS": [self.node.name_server], "CHECK_HORIZON": "PT20S"}
        for topic, kind in zip(self.names[:3], (TopicType.TRANSACTION, TopicType.FIFO, TopicType.DELAY), strict=True):
            self.node.make_topic(topic, kind, QUEUES)
        self.node.make_group(self.names.group, retries=10_000)
        self.node.make_group(f"{self.names.group}_fifo", is_ordered=True, retries=10_000)

    def copies(self) -> Copies:
        from project.servers.remoting import read_all

        return {
            topic: Counter(json.loads(one.body)["number"] for one in read_all(self.node.broker_address, topic, QUEUES))
            for topic in self.names[:3]
        }


SERVERS: dict[str, type[Server]] = {
    "embedded": EmbeddedServer,
    "kafka": KafkaServer,
    "rabbitmq": RabbitMQServer,
    "rocketmq": RocketMQServer,
}
