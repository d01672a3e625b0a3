"""
A relay whose broker is killed while half messages are committed, again and again, and nobody answers check-backs.

What a broker shows in the end is counted in its own log.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from outbox import database
from outbox.brokers.base import Ended, HalfRef, SendResult
from outbox.brokers.rocketmq import RocketMQBroker
from outbox.brokers.rocketmq.codec import stored_delivery
from outbox.message import Resolution, TopicSpec, TopicType
from outbox.models import Batch, State, Topic
from outbox.outages import Backoff
from outbox.relay.breaker import Breaker, Breakers
from outbox.relay.rounds import Relay
from project.servers.remoting import read_all
from project.servers.rocketmq import RocketMQ
from tests.factories import TicketFactory
from tests.outbox.brokers.rocketmq.standing import errors_of
from tests.waiting import wait_until

# Asked about after a second and given up after two questions: a COMMIT that was lost is lost for good a moment later.
SOON_DISCARDED = {"transactionTimeOut": 1000, "transactionCheckInterval": 1000, "transactionCheckMax": 2}

AT_ONCE = 300  # messages of a round
MAX_SECONDS = 0.5  # between the first end and the kill: a broker that has just started takes as long for all of them
PATIENCE = 180
QUEUES = 4


class WatchedBroker(RocketMQBroker):
    """Signals when ends begin, and remembers which were answered."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.is_ending = threading.Event()
        self.answered: set[str] = set()

    def end(self, halves: Sequence[HalfRef], resolution: Resolution, *, within: timedelta | None = None) -> list[SendResult]:
        self.is_ending.set()
        results = super().end(halves, resolution, within=within)
        self.answered |= {half.message_id for half, one in zip(halves, results, strict=True) if one.ended is Ended.COMMITTED}
        return results


@dataclass
class Toll:
    """What the kills have cost. `answered`: the messages whose COMMIT was answered by OK, and counts as done."""

    kills: int = 0
    committed: set[str] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)
    copies: Counter[str] = field(default_factory=Counter)

    @property
    def lost(self) -> set[str]:
        return self.committed - self.copies.keys()

    @property
    def lost_behind_an_ok(self) -> set[str]:
        return self.answered - self.copies.keys()

    @property
    def more_copies(self) -> int:
        return self.copies.total() - len(self.copies)


def play(node: RocketMQ, topic: Topic, kills: int, **options: Any) -> Toll:
    """
    Publish, relay, kill and start again so many times; return the toll, the messages not being swept yet.

    Args:
        options: of the broker.
    """
    toll = Toll()
    spec = TopicSpec(topic.name, TopicType.TRANSACTION)
    with closing(WatchedBroker("default", options, [spec])) as broker, database.connect("default") as connection:
        relay = Relay(connection, broker, 1, breakers=Breakers(lambda: Breaker(1000, Backoff(timedelta(0), timedelta(0)))))
        for nth in range(kills):
            wait_until(lambda: all("routes" in text for text in errors_of(broker)), PATIENCE)
            toll.committed |= {str(one.message_id) for one in TicketFactory.create_batch(AT_ONCE, topic=topic)}
            broker.is_ending.clear()
            working = threading.Thread(target=relay.step)
            working.start()
            assert broker.is_ending.wait(PATIENCE)
            time.sleep(MAX_SECONDS * (nth + random.random()) / kills)  # the moment of the kill is what is tried
            node.kill_broker()
            toll.kills += 1
            working.join()
            node.start_broker()
        toll.answered = broker.answered
    return toll


def sweep(options: dict[str, Any], topic: Topic) -> None:
    """Relay and sweep until every message is SENT."""
    spec = TopicSpec(topic.name, TopicType.TRANSACTION)
    with closing(RocketMQBroker("default", options, [spec])) as broker, database.connect("default") as connection:
        relay = Relay(connection, broker, 1)

        def is_all_sent() -> bool:
            relay.drain()
            relay.sweep()
            return not Batch.objects.exclude(state=State.SENT).exists()

        wait_until(is_all_sent, PATIENCE)


def copies_in(node: RocketMQ, topic: str, queues: int = QUEUES) -> Counter[str]:
    """Count the copies of each message that consumers can see, in the broker's own log."""
    stored = read_all(node.broker_address, topic, queues)
    return Counter(stored_delivery(one, group="", topic=topic, receipt="", dead_letter_reason="").message_id for one in stored)
