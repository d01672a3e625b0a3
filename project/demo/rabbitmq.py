"""The demo on RabbitMQ, with a node that is started for it and also has Celery's queues."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import amqp

from outbox import conf
from outbox.brokers.rabbitmq.client import LOST, describe
from outbox.brokers.rabbitmq.envelope import to_delivery
from outbox.brokers.rabbitmq.topology import QUORUM, declare_topic, queue_name
from outbox.consuming.register import groups
from project.demo.brokers import DemoBroker, count_held, count_unhandled, write_copies
from project.demo.kills import CONFIRMED, one_phase_rounds
from project.demo.outage import BrokerKill
from project.demo.processes import DemoError
from project.demo.report import Connection, Kills
from project.servers.program import ServerError
from project.servers.rabbitmq import RabbitMQ as Server

# A queue that is bound to all topics. It gets each message as often as relays sent it and RabbitMQ confirmed it, and is read only
# for the report.
WITNESS = "demo.witness"


class RabbitMQ(DemoBroker):
    """One RabbitMQ node, which is killed once, and started again with its data."""

    doors = ()
    rounds = one_phase_rounds(CONFIRMED)
    settle_seconds = 60
    opening = "starting RabbitMQ"

    def __init__(self) -> None:
        self._server: Server | None = None
        self._readers = {  # topic -> the groups that read it
            topic.name: [name for name, group in groups().items() if topic.name in group.topics]
            for topic in conf.topics_of("default")
        }

    @contextmanager
    def run(self, folder: Path) -> Iterator[None]:
        """
        Run the node for the time of the block, with the witness queue, which is declared before the first message.

        Raises:
            DemoError: the node did not start or answer.
        """
        try:
            with Server(folder / "rabbitmq") as self._server:
                self._declare_witness()
                yield
        except ServerError as error:
            raise DemoError(str(error)) from error

    def environment(self) -> dict[str, str]:
        options = {"NODES": [self._node.address], "GROUPS": self._readers}
        return {"DEMO_RABBITMQ": json.dumps(options), "CELERY_BROKER_URL": self._node.url}

    def plan_kill(self, connection: Connection) -> BrokerKill:
        """Return the kill of the node, which waits until the node's queues are on disk, so that they survive it."""

        def are_safe() -> bool:
            return all(map(self._node.knows_after_crash, [WITNESS, *self._queues()]))

        return BrokerKill(self._node, are_safe, partial(count_held, connection))

    def count_open(self, connection: Connection, kills: Kills) -> int:
        return count_unhandled(connection, kills) or self._count_ready()

    def show(self, connection: Connection) -> None:
        """Take each copy of a message from the witness queue."""
        copies = []
        with self._channel() as channel:
            while (message := channel.basic_get(WITNESS, no_ack=True)) is not None:
                copies.append(to_delivery(message, group="", topic=""))
        write_copies(connection, [(copy.message_id, copy.key) for copy in copies])

    @property
    def _node(self) -> Server:
        assert self._server is not None
        return self._server

    @contextmanager
    def _channel(self) -> Iterator[amqp.Channel]:
        """
        Yield a channel of a new connection.

        Raises:
            DemoError: the server does not answer.
        """
        try:
            with amqp.Connection(self._node.address) as client:
                yield client.channel()
        except LOST as error:
            raise DemoError(f"RabbitMQ did not answer: {describe(error)}.") from error

    def _declare_witness(self) -> None:
        with self._channel() as channel:
            channel.queue_declare(WITNESS, durable=True, auto_delete=False, arguments=QUORUM)
            for topic in conf.topics_of("default"):
                declare_topic(channel, topic)
                channel.queue_bind(WITNESS, topic.name, routing_key="#")

    def _queues(self) -> list[str]:
        return [queue_name(topic, group) for topic, names in self._readers.items() for group in names]

    def _count_ready(self) -> int:
        """Return the number of messages in the groups' queues. When all messages were handled, these are copies."""
        with self._channel() as channel:
            answers = [channel.queue_declare(queue, passive=True) for queue in self._queues()]
        return sum(answer[1] for answer in answers if answer is not None)
