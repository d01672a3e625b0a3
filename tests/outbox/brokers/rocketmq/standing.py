"""Whether a server that has just been started can be used."""

from __future__ import annotations

from outbox.brokers.rocketmq import RocketMQBroker
from outbox.errors import BrokerUnavailable
from outbox.findings import BROKER_WEAK

WARNINGS = (BROKER_WEAK, "outbox.W048")


def errors_of(broker: RocketMQBroker) -> list[str]:
    """Return the texts of the errors that a broker's check finds, and of the one that keeps it from being asked."""
    try:
        return [problem.text for problem in broker.check() if problem.id not in WARNINGS]
    except BrokerUnavailable as error:
        return [str(error)]
