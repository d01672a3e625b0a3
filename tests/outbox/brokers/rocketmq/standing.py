"""Whether a server that has just been started can be used, and takes a half message."""

from outbox.brokers.base import HalfRef, SendStatus
from outbox.brokers.rocketmq import RocketMQBroker
from outbox.errors import BrokerUnavailable
from outbox.findings import BROKER_WEAK
from outbox.message import TopicType
from tests.contracts.acts import Acts

WARNINGS = (BROKER_WEAK, "outbox.W048")


def errors_of(broker: RocketMQBroker) -> list[str]:
    """Return the texts of the errors that a broker's check finds, and of the one that keeps it from being asked."""
    try:
        return [problem.text for problem in broker.check() if problem.id not in WARNINGS]
    except BrokerUnavailable as error:
        return [str(error)]


def accepted(acts: Acts) -> HalfRef | None:
    """Send a half message; return it when it is stored."""
    [outcome] = acts.broker.send_halves([message := acts.message(TopicType.TRANSACTION)])
    half = HalfRef(message.topic, outcome.half_id, message.message_id, outcome.place)
    return half if outcome.status is SendStatus.ACCEPTED else None
