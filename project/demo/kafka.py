"""The demo on Kafka, with a node that is started for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from outbox import conf
from outbox.brokers.kafka import KafkaBroker
from outbox.brokers.kafka.codec import to_delivery
from outbox.brokers.kafka.options import KafkaOptions
from outbox.brokers.kafka.reading import read_end, read_records
from outbox.consuming.register import groups
from project.demo.brokers import DemoBroker, count_held, count_unhandled, write_copies
from project.demo.kills import COMMITTED, one_phase_rounds
from project.demo.outage import BrokerKill
from project.demo.processes import DemoError
from project.demo.report import Connection, Kills
from project.servers.kafka import Kafka as Server
from project.servers.program import ServerError

PARTITIONS = 4
CREATE_SECONDS = 30


class Kafka(DemoBroker):
    """One Kafka node, which is killed once, and started again with its data."""

    doors = ()
    publishes_once = True
    rounds = one_phase_rounds(COMMITTED)
    settle_seconds = 60
    opening = "starting Kafka"

    def __init__(self) -> None:
        self._server: Server | None = None

    @contextmanager
    def run(self, folder: Path) -> Iterator[None]:
        """
        Run the node for the time of the block, with the shop's topics.

        Raises:
            DemoError: the node did not start, or did not create the topics.
        """
        try:
            with Server(folder / "kafka") as self._server:
                self._create_topics()
                yield
        except ServerError as error:
            raise DemoError(str(error)) from error

    def environment(self) -> dict[str, str]:
        return {"DEMO_KAFKA": json.dumps(self._options)}

    def plan_kill(self, connection: Connection) -> BrokerKill:
        """Return the kill of the node. It is always safe: the machine keeps running, so confirmed records stay in its files."""
        return BrokerKill(self._node, lambda: True, partial(count_held, connection))

    def count_open(self, connection: Connection, kills: Kills) -> int:
        return count_unhandled(connection, kills) or self._count_backlog()

    def show(self, connection: Connection) -> None:
        """Read each copy of a message, like a consumer with isolation.level=read_committed."""
        options = KafkaOptions(servers=self._options["SERVERS"])
        copies = []
        try:
            for topic in conf.topics_of("default"):
                for partition in [TopicPartition(topic.name, number) for number in range(PARTITIONS)]:
                    end = read_end(options, "demo", partition)
                    for record in read_records(options, "demo", partition, 0, end):
                        copies.append(to_delivery(record, group="", receipt="", delivery_count=1))
        except (KafkaException, TimeoutError) as error:
            raise DemoError(f"The messages at Kafka could not be read: {error}.") from error
        write_copies(connection, [(copy.message_id, copy.key) for copy in copies])

    @property
    def _node(self) -> Server:
        assert self._server is not None
        return self._server

    @property
    def _options(self) -> dict[str, list[str]]:
        return {"SERVERS": [self._node.address]}

    def _create_topics(self) -> None:
        admin = AdminClient({"bootstrap.servers": self._node.address, "log_level": 0})
        new = [NewTopic(topic.name, PARTITIONS) for topic in conf.topics_of("default")]
        try:
            for created in admin.create_topics(new).values():
                created.result(CREATE_SECONDS)
        except KafkaException as error:
            raise DemoError(f"Kafka did not create the shop's topics: {error}.") from error

    def _count_backlog(self) -> int:
        """Return the number of messages that wait for groups. When all messages were handled, these are copies."""
        with closing(KafkaBroker("default", self._options, conf.topics_of("default"))) as broker:
            return sum(waiting for group in groups() for waiting in broker.backlog(group).waiting.values())
