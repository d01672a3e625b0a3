"""
Sends one-phase messages, with concurrent requests. Each message is sent once.

Messages of normal topics go directly to a broker if OPTIONS has NAME_SERVERS or BROKER_ADDRESSES: this costs less than the proxy,
and the broker's answer proves as much. Other messages go through the proxy, which chooses the queue of a key on fifo topics.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from outbox.brokers.base import ACCEPTED, Outgoing, SendResult, SendStatus
from outbox.brokers.rocketmq.client import RocketMQClient
from outbox.brokers.rocketmq.codec import to_proto
from outbox.brokers.rocketmq.endpoints import Endpoint
from outbox.brokers.rocketmq.errors import StatusError
from outbox.brokers.rocketmq.fault_strategy import FaultStrategy
from outbox.brokers.rocketmq.remoting_sender import RemotingSender
from outbox.brokers.rocketmq.statuses import FLOW_CONTROLLED, is_flow_control, status_before_send, status_of
from outbox.brokers.rocketmq.stubs import Code, service
from outbox.logs import get_logger
from outbox.message import TopicSpec, TopicType

logger = get_logger(__name__)

SEND_SECONDS = 10.0  # no message of a batch is sent later than this after the first, since the relay's lease must outlast them
NOT_STARTED = SendResult(SendStatus.UNAVAILABLE, reason="Not sent: the messages before it took too long. It will be retried.")
BLOCKED = SendResult(SendStatus.UNAVAILABLE, reason="An earlier message of its key was not accepted.")


class ProxySender:
    """
    Sends messages through the proxies, one per call. Use it only in the client's event loop.

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
        self._proxies = FaultStrategy(clock)

    async def send(self, message: Outgoing, topic: TopicSpec, wire_id: str) -> tuple[Endpoint | None, Any]:
        """Send a message. Return its proxy, and the answer's entry if the message is stored, otherwise a SendResult."""
        try:
            endpoint = await self._choose_proxy(topic, message)
            if self._proxies.backoff_seconds(endpoint.target):
                return endpoint, SendResult(SendStatus.UNAVAILABLE, reason=FLOW_CONTROLLED)
            request = service.SendMessageRequest(messages=[self._to_proto(message, topic, wire_id)])
        except Exception as error:  # callers get every error as a result
            return None, status_before_send(error)
        started = self._clock()
        try:
            answer = await self.client.call(endpoint, "SendMessage", request)
            entry = answer.entries[0]
            if entry.status.code != Code.OK:
                raise StatusError(entry.status)
        except Exception as error:
            return endpoint, self._on_failure(endpoint, topic, error)
        self._proxies.record_answer(endpoint.target, self._clock() - started)
        return endpoint, entry

    def _to_proto(self, message: Outgoing, topic: TopicSpec, wire_id: str) -> Any:
        above = self.client.options.compress_above_bytes
        resource = self.client.resource(topic.name)
        return to_proto(message, topic.type, wire_id, resource, now=self._now(), compress_above=above)

    def _on_failure(self, endpoint: Endpoint, topic: TopicSpec, error: Exception) -> SendResult:
        """Record the failure of a send at its proxy, and return the result of the send."""
        outcome = status_of(error)
        if isinstance(error, StatusError) and error.code == Code.TOPIC_NOT_FOUND and self.client.routes.was_seen(topic.name):
            outcome = SendResult(
                SendStatus.UNAVAILABLE, reason=f"{outcome.reason} It was there recently: its brokers may be down."
            )
        if is_flow_control(error):
            if seconds := self._proxies.record_flow_control(endpoint.target):
                logger.warning(
                    "Proxy %s applies flow control; nothing is sent to it for %.1f s: %s", endpoint.target, seconds, error
                )
        elif outcome.status is not SendStatus.REFUSED:
            self.client.routes.invalidate(topic.name)
            if outcome.status is not SendStatus.MISCONFIGURED:
                self._proxies.record_failure(endpoint.target)
        return outcome

    async def _choose_proxy(self, topic: TopicSpec, message: Outgoing) -> Endpoint:
        """Choose a proxy by round robin among the available ones; on fifo topics, always the same one for a key."""
        queues = await self.client.routes.of(topic.name)
        writable = [queue.endpoint for queue in queues if queue.is_writable] or [queue.endpoint for queue in queues]
        if topic.type is TopicType.FIFO:
            return writable[zlib.crc32(message.key.encode()) % len(writable)]
        first = self.client.next_index() % len(writable)
        endpoints = {endpoint.target: endpoint for endpoint in writable[first:] + writable[:first]}
        return endpoints[self._proxies.choose(list(endpoints))]


class RocketMQSender:
    """
    Sends one-phase messages.

    Args:
        clock: a monotonic clock in seconds.
    """

    def __init__(
        self, proxy_sender: ProxySender, remoting_sender: RemotingSender, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = proxy_sender.client
        self._proxy_sender = proxy_sender
        self._remoting_sender = remoting_sender
        self._clock = clock

    def send(self, messages: Sequence[Outgoing], topics: Sequence[TopicSpec]) -> list[SendResult]:
        """Send messages; on fifo topics, the messages of a key one after the other."""
        pairs = list(zip(messages, topics, strict=True))
        chains: dict[object, list[int]] = {}  # indexes of messages to send one after the other: those of a fifo key, or only one
        for index, (message, topic) in enumerate(pairs):
            chains.setdefault((topic.name, message.key) if topic.type is TopicType.FIFO else index, []).append(index)
        outcomes: list[SendResult] = [BLOCKED] * len(pairs)
        deadline = self._clock() + SEND_SECONDS

        async def send_chain(chain: list[int]) -> None:
            for index in chain:
                outcomes[index] = NOT_STARTED if self._clock() >= deadline else await self._send(*pairs[index])
                if outcomes[index].status is not SendStatus.ACCEPTED:  # later messages of the key must not overtake it
                    return

        self._client.run(self._client.pipelined(list(chains.values()), send_chain))
        return outcomes

    async def _send(self, message: Outgoing, topic: TopicSpec) -> SendResult:
        is_direct = topic.type is TopicType.NORMAL and self._client.remoting.is_configured
        send: Callable[..., Awaitable[tuple[Any, Any]]] = self._remoting_sender.send if is_direct else self._proxy_sender.send
        _, sent = await send(message, topic, message.message_id)
        return sent if isinstance(sent, SendResult) else ACCEPTED
