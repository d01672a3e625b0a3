"""A real RocketMQ for the contract; its time cannot be moved."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from outbox.brokers.base import Broker, Delivery, Outcome, Outgoing
from outbox.brokers.rocketmq import RocketMQBroker
from outbox.message import TopicType
from tests.contracts.harness import Harness
from tests.rocketmq_node import server

SCALE = 1 / 20  # a minute of the contract takes 3 s
SETTLED = timedelta(seconds=0.4)
LATE = 2 * SETTLED.total_seconds()
PATIENCE = "PT30S"  # as JSON can write it, for other processes


class PatientRocketMQ(RocketMQBroker):
    """Takes the contract's minutes for seconds, and receives till nothing more comes: a server hands out by and by."""

    def send(self, messages: Sequence[Outgoing]) -> list[Outcome]:
        return super().send([_sooner(message) for message in messages])

    def receive(
        self,
        group: str,
        topics: Mapping[str, frozenset[str] | None],
        *,
        limit: int,
        invisible_for: timedelta,
        wait: timedelta,
    ) -> list[Delivery]:
        found: list[Delivery] = []
        deadline = time.monotonic() + wait.total_seconds()
        while len(found) < limit:
            left, asked = limit - len(found), time.monotonic()
            more = super().receive(group, topics, limit=left, invisible_for=invisible_for * SCALE, wait=SETTLED)
            found += more
            is_late = time.monotonic() - asked > LATE  # a server that stood still has handed out nothing in that time
            if not more and not is_late and (found or time.monotonic() >= deadline):
                break
        return found

    def retry(self, delivery: Delivery, after: timedelta) -> bool:
        return super().retry(delivery, after * SCALE)


class RocketMQHarness(Harness):
    broker_class = PatientRocketMQ
    lateness = timedelta(seconds=5)
    remembers_ends = False
    refuses_second_ack = False
    can_start_at_the_end = False
    counts_what_is_handled = False
    keeps_reasons = False

    def __init__(self) -> None:
        super().__init__()
        for topic in self.topics.values():
            server().make_topic(topic.name, topic.type, queues=64 if topic.type is TopicType.FIFO else 4)

    def pass_time(self, span: timedelta) -> None:
        super().pass_time(span)
        time.sleep((span * SCALE).total_seconds())

    def options(self) -> dict[str, Any]:
        """Give times that a busy machine keeps, too; nobody listens in the contract, so no commit meets a check."""
        return {
            "ENDPOINTS": server().endpoints,
            "BROKER_ADDRESSES": [server().broker],
            "REQUEST_TIMEOUT": PATIENCE,
            "COMMIT_WINDOW": PATIENCE,
        }

    def options_elsewhere(self) -> dict[str, Any]:
        return self.options()

    def is_now(self, time: datetime | None) -> bool:
        return time is not None and abs(datetime.now(UTC) - time) < timedelta(seconds=30)

    def open_unreachable(self) -> Broker:
        return self.open(ENDPOINTS="127.0.0.1:1")


def _sooner(message: Outgoing) -> Outgoing:
    if message.deliver_at is None or not message.topic.startswith(TopicType.DELAY):
        return message
    now = datetime.now(UTC)
    return replace(message, deliver_at=now + (message.deliver_at - now) * SCALE)
