"""A real RabbitMQ for the contract; its time cannot be moved."""

from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar

import amqp
import pytest

from outbox.brokers.base import Broker, Outgoing
from outbox.brokers.rabbitmq import RabbitMQBroker
from outbox.brokers.rabbitmq.topology import queue_name
from outbox.message import TopicType
from tests.contracts.real_time import RealTimeHarness
from tests.rabbitmq_node import server
from tests.waiting import wait_until

GROUPS = ["group", "cart", "points", "shipment", "other", "old-group", "new-group"]


class RabbitMQHarness(RealTimeHarness):
    """Deliveries expire by the harness' clock."""

    broker_class = RabbitMQBroker
    marks: ClassVar = [pytest.mark.rabbitmq, pytest.mark.timeout(120)]
    lateness = timedelta(seconds=10)
    can_restart = True
    keeps_owners = "a virtual host of its own"
    can_start_at_the_end = False
    counts_what_is_handled = False
    moves_between_members = False  # what is released stays with its process for some seconds
    gives_back_at_once = True
    forgets_groups = True

    def open(self, **options: Any) -> Broker:
        topics = list(self.topics.values())
        broker = RabbitMQBroker("default", {**self.options(), **options}, topics, clock=lambda: self.now.timestamp())
        self._opened.append(broker)
        return broker

    def options(self) -> dict[str, Any]:
        groups = {topic.name: GROUPS for topic in self.topics.values() if topic.type is not TopicType.TRANSACTION}
        return {"NODES": [server().address], "GROUPS": groups}

    def options_elsewhere(self) -> dict[str, Any]:
        return {**self.options(), "GROUPS": {}}

    def restart(self) -> None:
        server().kill()
        server().start()

    def give_up(self, group: str, messages: Sequence[Outgoing]) -> None:
        """Return messages to their queues until a delivery limit is reached."""
        queues = {queue_name(message.topic, group) for message in messages}
        policy = ("/", "impatient", f"^({'|'.join(queues)})$", '{"delivery-limit": 2}', "0", "queues")
        server().call("rabbit_policy:parse_set", *policy)
        with amqp.Connection(server().address) as connection, connection.channel() as channel:
            for queue in queues:
                channel.basic_consume(queue, callback=lambda message: channel.basic_reject(message.delivery_tag, requeue=True))
            wait_until(lambda: self._drained(connection, queues) == len(messages), 60)
        server().call("rabbit_policy:delete", *policy[:2])

    def _drained(self, connection: amqp.Connection, queues: Collection[str]) -> int:
        with suppress(TimeoutError):
            connection.drain_events(timeout=0.1)
        with connection.channel() as channel:
            return sum(channel.queue_declare(f"{queue}:given-up", passive=True)[1] for queue in queues)

    def open_unreachable(self) -> Broker:
        return self.open(NODES=["127.0.0.1:1"])
