"""Sends messages directly to the brokers, over the remoting protocol: chooses a broker of the topic, and reads its answer."""

from __future__ import annotations

import time
from collections.abc import Callable

from outbox.brokers.base import Outgoing, SendResult, SendStatus
from outbox.brokers.rocketmq.client import RocketMQClient
from outbox.brokers.rocketmq.codec import TYPES, born_at, to_remoting
from outbox.brokers.rocketmq.endpoints import Queue
from outbox.brokers.rocketmq.fault_strategy import FaultStrategy
from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.connection import NoAnswer, NotConnected
from outbox.brokers.rocketmq.remoting.frames import RemotingAnswer, Request
from outbox.brokers.rocketmq.statuses import FLOW_CONTROL_CODES, FLOW_CONTROLLED, status_before_send, status_of, status_of_send
from outbox.brokers.rocketmq.stubs import definition
from outbox.logs import get_logger
from outbox.message import TopicSpec

logger = get_logger(__name__)


class RemotingSender:
    """
    Sends messages, one per call. Use it only in the client's event loop.

    Args:
        clock: a monotonic clock in seconds.
        now: the current time in seconds since 1970, for the timestamps of messages.
    """

    def __init__(
        self, client: RocketMQClient, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time
    ) -> None:
        self.client = client
        self._clock = clock
        self._now = now
        self._brokers = FaultStrategy(clock)

    async def send(self, message: Outgoing, topic: TopicSpec, wire_id: str) -> tuple[str, RemotingAnswer | SendResult]:
        """Send a message. Return the broker's name, and its answer if the message is stored, otherwise a SendResult."""
        try:
            name, address = await self._choose_broker(topic)
        except NotConnected as error:
            return "", self._on_failure("", topic, SendResult(SendStatus.UNAVAILABLE, reason=str(error)))
        except Exception as error:  # callers get every error as a result
            outcome = status_before_send(error)
            if outcome.status is SendStatus.MISCONFIGURED and not await self.client.remoting.has_brokers():
                outcome = SendResult(SendStatus.UNAVAILABLE, reason=f"No broker is available: {outcome.reason}")
            return "", outcome
        if name == "":
            return "", self._on_failure("", topic, SendResult(SendStatus.MISCONFIGURED, reason=address))
        if self._brokers.backoff_seconds(name):
            return name, SendResult(SendStatus.UNAVAILABLE, reason=FLOW_CONTROLLED)
        started = self._clock()
        try:
            answer = await self.client.remoting.ask(address, self._to_request(message, topic, wire_id))
        except NotConnected as error:
            return name, self._on_failure(name, topic, SendResult(SendStatus.UNAVAILABLE, reason=f"Not sent: {error}"))
        except NoAnswer as error:
            return name, self._on_failure(name, topic, SendResult(SendStatus.UNSURE, reason=f"No answer from RocketMQ: {error}"))
        except Exception as error:  # for example a message that cannot be encoded, which must not affect the others
            return name, status_of(error)
        if answer.code:
            return name, self._on_error_answer(name, topic, answer)
        self._brokers.record_answer(name, self._clock() - started)
        return name, answer

    def _to_request(self, message: Outgoing, topic: TopicSpec, wire_id: str) -> Request:
        now, above = self._now(), self.client.options.compress_above_bytes
        properties, body, flag = to_remoting(message, topic.type, wire_id, now=now, compress_above=above)
        born = born_at(topic.type, now)
        return requests.send(topic.name, requests.ANY_QUEUE, body, properties, group=topic.name, flag=flag, born_at=born)

    async def _choose_broker(self, topic: TopicSpec) -> tuple[str, str]:
        """
        Return the name and address of an available broker of the topic, by round robin.

        If the topic's type is wrong, or OPTIONS lacks the brokers' addresses, return "" and the reason instead.
        """
        queues = await self.client.routes.of(topic.name)
        if wrong := wrong_type(topic, queues):
            return "", wrong
        addresses = await self.client.remoting.addresses(topic.name)
        names = sorted({queue.broker for queue in queues if queue.is_writable and queue.broker in addresses})
        if not names:
            brokers = ", ".join(sorted({queue.broker for queue in queues}))
            reason = f"Topic {topic.name} is on {brokers}: none of these brokers is both writable and known by address."
            if self.client.options.name_servers:  # they omit brokers that are down: this may be an outage, not a misconfiguration
                raise NotConnected(reason)
            return "", f'{reason} Set OPTIONS["NAME_SERVERS"], or add names and host:port to OPTIONS["BROKER_ADDRESSES"].'
        first = self.client.next_index() % len(names)
        name = self._brokers.choose(names[first:] + names[:first])
        return name, addresses[name]

    def _on_error_answer(self, name: str, topic: TopicSpec, answer: RemotingAnswer) -> SendResult:
        if answer.code not in FLOW_CONTROL_CODES:
            return self._on_failure(name, topic, status_of_send(answer))
        if seconds := self._brokers.record_flow_control(name):
            logger.warning("Broker %s applies flow control; nothing is sent to it for %.1f s: %s", name, seconds, answer.text)
        return SendResult(SendStatus.UNAVAILABLE, reason=FLOW_CONTROLLED)

    def _on_failure(self, name: str, topic: TopicSpec, outcome: SendResult) -> SendResult:
        """Look the topic's brokers up again at the next send, avoid the broker for a while, and return the result unchanged."""
        if outcome.status is not SendStatus.REFUSED:
            self.client.routes.invalidate(topic.name)
            self.client.remoting.invalidate(topic.name)
            if name and outcome.status is not SendStatus.MISCONFIGURED:
                self._brokers.record_failure(name)
        return outcome


def wrong_type(topic: TopicSpec, queues: list[Queue]) -> str:
    """
    Return why the server does not accept messages of a topic's type in settings; "" if it accepts them, or if this is unknown.

    It is unknown for a topic that a proxy in cluster mode first queried while the topic's broker was down.
    """
    kinds = {kind for queue in queues for kind in queue.proto.accept_message_types}
    if TYPES[topic.type] in kinds or not kinds - {definition.MessageType.MESSAGE_TYPE_UNSPECIFIED}:
        return ""
    return f"Topic {topic.name} does not accept messages of type {topic.type} on the server."
