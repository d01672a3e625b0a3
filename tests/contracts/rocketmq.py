"""A real RocketMQ for the contract; its time cannot be moved."""

import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import pytest

from outbox.brokers.base import Broker, Delivery, HalfRef, HalfStatus, Outgoing, SendResult
from outbox.brokers.capabilities import HasDeadLetterQueue
from outbox.brokers.rocketmq import RocketMQBroker
from outbox.brokers.rocketmq.group_checks import MIN_RETRIES
from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.client import RemotingClient
from outbox.brokers.rocketmq.remoting.connection import NoAnswer
from outbox.brokers.rocketmq.remoting.frames import RemotingAnswer, Request
from outbox.message import TopicType
from project.servers.remoting import exchange, query
from tests.contracts.real_time import SCALE, RealTimeHarness, sooner
from tests.rocketmq_node import MARKS, server
from tests.waiting import wait_until

LEAST_WAIT = timedelta(seconds=0.1)  # of the server, as it is set up
PATIENCE = "PT30S"  # as JSON can write it, for other processes


class PatientRocketMQ(RocketMQBroker):
    """Takes the contract's minutes for seconds, and receives till nothing more comes: a server hands out by and by."""

    def send(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        return super().send([sooner(message) for message in messages])

    def receive(
        self,
        group: str,
        topics: Collection[str],
        *,
        limit: int,
        invisible_for: timedelta,
        wait: timedelta,
    ) -> list[Delivery]:
        found: list[Delivery] = []
        deadline = time.monotonic() + wait.total_seconds()
        self._wait_until_all_is_queued()
        while len(found) < limit:
            left = limit - len(found)
            more = super().receive(group, topics, limit=left, invisible_for=invisible_for * SCALE, wait=LEAST_WAIT)
            found += more
            if not more and (found or time.monotonic() >= deadline):
                break
        return found

    def look_up_halves(self, halves: Sequence[HalfRef]) -> list[HalfStatus]:
        """The sweep lets 10 s pass behind the last end, which the contract has sent a moment ago."""
        self._wait_until_all_is_queued()
        return super().look_up_halves(halves)

    def _wait_until_all_is_queued(self) -> None:
        """
        Return when what the server has stored is in its queues, too.

        It queues and indexes one message after the other: when it finds a last one by its key, all are queued.
        """
        for broker in [server().broker_address]:
            key = uuid.uuid4().hex
            with suppress(ConnectionRefusedError):  # where it is away on purpose
                exchange(broker, requests.send(MARKS, requests.ANY_QUEUE, b"a mark", {"KEYS": key}, group=requests.READER))
                wait_until(partial(query, broker, MARKS, key), 60)

    def renew(self, deliveries: Sequence[Delivery], invisible_for: timedelta) -> list[Delivery | None]:
        return super().renew(deliveries, invisible_for * SCALE)


class RocketMQHarness(RealTimeHarness):
    broker_class = PatientRocketMQ
    marks: ClassVar = [pytest.mark.rocketmq, pytest.mark.timeout(420)]
    lateness = timedelta(seconds=30)
    remembers_ends = False
    # It says where it stores half messages, but an end is for whatever lies at its place: look it up first (docs/explanation/
    # half-messages.md). So what the contract says of places is not said of it.
    places_halves = False
    can_lose_ends = True
    can_restart = True
    keeps_owners = "a NAMESPACE of its own"
    refuses_second_ack = False
    can_start_at_the_end = False
    counts_what_is_handled = False

    def __init__(self) -> None:
        super().__init__()
        self._made = time.monotonic()
        for topic in self.topics.values():
            server().make_topic(topic.name, topic.type, queues=64 if topic.type is TopicType.FIFO else 4)

    def pass_time(self, span: timedelta) -> None:
        super().pass_time(span)
        time.sleep((span * SCALE).total_seconds())

    def age(self) -> timedelta:
        return timedelta(seconds=time.monotonic() - self._made) / SCALE

    def options(self) -> dict[str, Any]:
        """Return times that a busy machine keeps, too; nobody listens in the contract, so no commit meets a check."""
        return {
            "ENDPOINTS": server().endpoints,
            "NAME_SERVERS": [server().name_server],
            "REQUEST_TIMEOUT": PATIENCE,
            "COMMIT_WINDOW": PATIENCE,
        }

    def options_elsewhere(self) -> dict[str, Any]:
        return self.options()

    @contextmanager
    def lose_ends(self, broker: Broker, *, arrive: bool) -> Iterator[None]:
        ask = RemotingClient.ask

        async def ask_unheard(remoting: RemotingClient, place: str, request: Request) -> RemotingAnswer:
            if request.code != requests.END_TRANSACTION:
                return await ask(remoting, place, request)
            if arrive:
                await ask(remoting, place, request)
            raise NoAnswer("The connection was lost.")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RemotingClient, "ask", ask_unheard)
            yield

    def give_up(self, group: str, messages: Sequence[Outgoing]) -> None:
        """Release messages until the server has delivered them as often as its groups allow, which is twice for now."""
        broker = HasDeadLetterQueue.of(self.open())
        topics, ids = {message.topic for message in messages}, {message.message_id for message in messages}

        def are_given_up() -> bool:
            broker.release(broker.receive(group, topics, limit=32, invisible_for=timedelta(minutes=1), wait=LEAST_WAIT))
            return {delivery.message_id for delivery in broker.receive_dead_letters(group, topics, limit=100)} >= ids

        self._limit_retries(group, 1)
        try:
            wait_until(are_given_up, 60)
        finally:
            self._limit_retries(group, MIN_RETRIES)

    def new_group(self, name: str) -> str:
        group = super().new_group(name)
        self._limit_retries(group, MIN_RETRIES)
        return group

    def _limit_retries(self, group: str, retries: int) -> None:
        server().make_group(group, retries=retries)
        server().make_group(f"{group}_fifo", is_ordered=True, retries=retries)

    def restart(self) -> None:
        server().kill_broker()
        server().start_broker()

    def open_unreachable(self) -> Broker:
        return self.open(ENDPOINTS="127.0.0.1:1", NAME_SERVERS=["127.0.0.1:1"])
