"""Sends messages to the brokers' own ports: chooses a broker of the topic, and says what its answer means."""

from __future__ import annotations

import time
from collections.abc import Callable

from outbox.brokers.base import Outgoing, SendResult, SendStatus
from outbox.brokers.rocketmq.avoidance import Avoidance
from outbox.brokers.rocketmq.client import Client
from outbox.brokers.rocketmq.endpoints import Queue
from outbox.brokers.rocketmq.envelope import TYPES, born_at, seal_for_port
from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.connection import NoAnswer, NotConnected
from outbox.brokers.rocketmq.remoting.frames import Answer, Request
from outbox.brokers.rocketmq.statuses import FLOW_CONTROL_CODES, LESS, status_before_send, status_of, status_of_send
from outbox.brokers.rocketmq.stubs import definition
from outbox.logs import get_logger
from outbox.message import TopicSpec

logger = get_logger(__name__)


class PortSender:
    """
    Sends messages, one at a call. In the client's loop only.

    Args:
        clock: gives seconds; it never goes back.
        now: gives seconds since 1970, by which messages are stamped.
    """

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time) -> None:
        self.client = client
        self._clock = clock
        self._now = now
        self._brokers = Avoidance(clock)

    async def send(self, message: Outgoing, topic: TopicSpec, wire_id: str) -> tuple[str, Answer | SendResult]:
        """Send a message; return its broker's name, and the answer where the message is stored, else what became of it."""
        try:
            name, address = await self._choose(topic)
        except NotConnected as error:
            return "", self._failed("", topic, SendResult(SendStatus.UNAVAILABLE, reason=str(error)))
        except Exception as error:  # whatever happened, it is an outcome
            outcome = status_before_send(error)
            if outcome.status is SendStatus.MISCONFIGURED and not await self.client.ports.is_any_broker_there():
                outcome = SendResult(SendStatus.UNAVAILABLE, reason=f"No broker is there: {outcome.reason}")
            return "", outcome
        if name == "":
            return "", self._failed("", topic, SendResult(SendStatus.MISCONFIGURED, reason=address))
        if self._brokers.seconds_held(name):
            return name, SendResult(SendStatus.UNAVAILABLE, reason=LESS)
        at = self._clock()
        try:
            answer = await self.client.ports.ask(address, self._seal(message, topic, wire_id))
        except NotConnected as error:
            return name, self._failed(name, topic, SendResult(SendStatus.UNAVAILABLE, reason=f"Not sent: {error}"))
        except NoAnswer as error:
            return name, self._failed(name, topic, SendResult(SendStatus.UNSURE, reason=f"No answer from RocketMQ: {error}"))
        except Exception as error:  # a message that cannot be written as a request says nothing of its fellows
            return name, status_of(error)
        if answer.code:
            return name, self._refused(name, topic, answer)
        self._brokers.note_answer(name, self._clock() - at)
        return name, answer

    def _seal(self, message: Outgoing, topic: TopicSpec, wire_id: str) -> Request:
        now, above = self._now(), self.client.options.compress_above_bytes
        properties, body, flag = seal_for_port(message, topic.type, wire_id, now=now, compress_above=above)
        born = born_at(topic.type, now)
        return requests.send(topic.name, requests.ANY_QUEUE, body, properties, group=topic.name, flag=flag, born_at=born)

    async def _choose(self, topic: TopicSpec) -> tuple[str, str]:
        """Return name and address of the best of the topic's brokers, in turn; "" and a reason where there is none."""
        queues = await self.client.routes.of(topic.name)
        if wrong := wrong_type(topic, queues):
            return "", wrong
        addresses = await self.client.ports.addresses(topic.name)
        names = sorted({queue.broker for queue in queues if queue.is_writable and queue.broker in addresses})
        if not names:
            there = ", ".join(sorted({queue.broker for queue in queues}))
            reason = f"Topic {topic.name} is on {there}: no broker that takes messages, and whose own port is known."
            if self.client.options.name_servers:  # which name no broker that is away
                raise NotConnected(reason)
            return "", f'{reason} Give OPTIONS["NAME_SERVERS"], or its name and host:port in OPTIONS["BROKER_ADDRESSES"].'
        first = self.client.next_turn() % len(names)
        name = self._brokers.choose(names[first:] + names[:first])
        return name, addresses[name]

    def _refused(self, name: str, topic: TopicSpec, answer: Answer) -> SendResult:
        if answer.code not in FLOW_CONTROL_CODES:
            return self._failed(name, topic, status_of_send(answer))
        if seconds := self._brokers.note_flow_control(name):
            logger.warning("Broker %s asks for less, and is sent nothing for %.1f s: %s", name, seconds, answer.text)
        return SendResult(SendStatus.UNAVAILABLE, reason=LESS)

    def _failed(self, name: str, topic: TopicSpec, outcome: SendResult) -> SendResult:
        if outcome.status is not SendStatus.REFUSED:
            self.client.routes.doubt(topic.name)
            self.client.ports.doubt(topic.name)
            if name and outcome.status is not SendStatus.MISCONFIGURED:
                self._brokers.note_failure(name)
        return outcome


def wrong_type(topic: TopicSpec, queues: list[Queue]) -> str:
    """
    Return why a topic does not take messages of its type; empty: it does, or nobody knows.

    A proxy of its own gives topics no type that it has first asked for while their broker was away.
    """
    kinds = {kind for queue in queues for kind in queue.proto.accept_message_types}
    if TYPES[topic.type] in kinds or not kinds - {definition.MessageType.MESSAGE_TYPE_UNSPECIFIED}:
        return ""
    return f"Topic {topic.name} does not take messages of type {topic.type} at the server."
