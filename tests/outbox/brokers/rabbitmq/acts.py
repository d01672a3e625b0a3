"""What tests do with a broker, and wait for."""

from contextlib import suppress
from datetime import timedelta

from outbox.brokers.base import Delivery, Outgoing, SendResult, SendStatus
from outbox.brokers.rabbitmq import RabbitMQBroker
from outbox.errors import BrokerUnavailable
from tests.outbox.brokers.rabbitmq.conftest import HELD
from tests.waiting import wait_until


def receive_all(broker: RabbitMQBroker, topic: str, wanted: int | set[str]) -> list[str]:
    """Receive and acknowledge until these, or so many different messages, have come; return the ids of all, again and again."""
    found: list[str] = []

    def receive() -> bool:
        with suppress(BrokerUnavailable):
            deliveries = broker.receive("billing", [topic], limit=500, invisible_for=HELD, wait=timedelta(seconds=1))
            found.extend(one.message_id for one in deliveries)
            broker.ack(deliveries)
        return len(set(found)) >= wanted if isinstance(wanted, int) else wanted <= set(found)

    wait_until(receive, 60)
    return found


def statuses(results: list[SendResult]) -> list[SendStatus]:
    return [one.status for one in results]


def accepted(broker: RabbitMQBroker, one: Outgoing) -> list[SendResult] | None:
    results = broker.send([one])
    return results if results[0].status is SendStatus.ACCEPTED else None


def refused(broker: RabbitMQBroker, one: Outgoing) -> list[SendResult] | None:
    results = broker.send([one])
    return results if results[0].status is SendStatus.UNAVAILABLE else None


def drain(broker: RabbitMQBroker, topic: str) -> list[str]:
    """Receive and acknowledge what waits for the group "shipping"; return its ids."""
    deliveries = broker.receive("shipping", [topic], limit=100, invisible_for=HELD, wait=timedelta(seconds=1))
    broker.ack(deliveries)
    return [one.message_id for one in deliveries]


def received(broker: RabbitMQBroker, topic: str) -> list[Delivery]:
    with suppress(BrokerUnavailable):
        return broker.receive("billing", [topic], limit=10, invisible_for=HELD, wait=timedelta(seconds=1))
    return []
