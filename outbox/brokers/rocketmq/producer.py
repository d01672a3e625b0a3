"""
One-phase sends, pipelined: some requests wait for their answers at once, each message goes out once.

Messages without an order go to a broker's own port where that is known, which costs less than the way through the proxy and
is answered as firmly. Those of a key that keeps order go through the proxy, which chooses the key's queue.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from outbox.brokers.base import Outgoing, SendResult, SendStatus
from outbox.brokers.rocketmq.avoidance import Avoidance
from outbox.brokers.rocketmq.client import Client
from outbox.brokers.rocketmq.endpoints import Endpoint
from outbox.brokers.rocketmq.envelope import seal
from outbox.brokers.rocketmq.errors import StatusError
from outbox.brokers.rocketmq.pipelines import pipelined
from outbox.brokers.rocketmq.port_sender import PortSender
from outbox.brokers.rocketmq.statuses import LESS, is_flow_control, status_before_send, status_of
from outbox.brokers.rocketmq.stubs import Code, service
from outbox.logs import get_logger
from outbox.message import TopicSpec, TopicType

logger = get_logger(__name__)

SEND_SECONDS = 10.0  # no message of a batch is begun later: the relay's lease must outlast the batch
NOT_BEGUN = SendResult(SendStatus.UNAVAILABLE, reason="Not sent: the messages before it took too long. It goes again.")
HELD = SendResult(SendStatus.UNAVAILABLE, reason="An earlier message of its key was not accepted.")
ACCEPTED = SendResult(SendStatus.ACCEPTED)


class ProxySender:
    """
    Sends messages through the proxies, one at a call. In the client's loop only.

    Args:
        clock: gives seconds; it never goes back.
        now: gives seconds since 1970, by which messages are stamped.
    """

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time) -> None:
        self.client = client
        self._clock = clock
        self._now = now
        self._proxies = Avoidance(clock)

    async def send(self, message: Outgoing, topic: TopicSpec, wire_id: str) -> tuple[Endpoint | None, Any]:
        """Send a message; return its proxy, and the answer's entry where the message is stored, else what became of it."""
        try:
            endpoint = await self._endpoint(topic, message)
            if self._proxies.seconds_held(endpoint.target):
                return endpoint, SendResult(SendStatus.UNAVAILABLE, reason=LESS)
            request = service.SendMessageRequest(messages=[self._seal(message, topic, wire_id)])
        except Exception as error:  # whatever happened, it is an outcome
            return None, status_before_send(error)
        at = self._clock()
        try:
            answer = await self.client.call(endpoint, "SendMessage", request)
            entry = answer.entries[0]
            if entry.status.code != Code.OK:
                raise StatusError(entry.status)
        except Exception as error:
            return endpoint, self._failed(endpoint, topic, error)
        self._proxies.note_answer(endpoint.target, self._clock() - at)
        return endpoint, entry

    def _seal(self, message: Outgoing, topic: TopicSpec, wire_id: str) -> Any:
        above = self.client.options.compress_above_bytes
        resource = self.client.resource(topic.name)
        return seal(message, topic.type, wire_id, resource, now=self._now(), compress_above=above)

    def _failed(self, endpoint: Endpoint, topic: TopicSpec, error: Exception) -> SendResult:
        """Note what a failure says of its proxy; return the outcome."""
        outcome = status_of(error)
        if is_flow_control(error):
            if seconds := self._proxies.note_flow_control(endpoint.target):
                logger.warning("Proxy %s asks for less, and is sent nothing for %.1f s: %s", endpoint.target, seconds, error)
        elif outcome.status is not SendStatus.REFUSED:
            self.client.routes.doubt(topic.name)
            if outcome.status is not SendStatus.MISCONFIGURED:
                self._proxies.note_failure(endpoint.target)
        return outcome

    async def _endpoint(self, topic: TopicSpec, message: Outgoing) -> Endpoint:
        """Choose the proxy: the best in turn, but always the same one for a key that keeps order."""
        queues = await self.client.routes.of(topic.name)
        writable = [queue.endpoint for queue in queues if queue.is_writable] or [queue.endpoint for queue in queues]
        if topic.type is TopicType.FIFO:
            return writable[zlib.crc32(message.key.encode()) % len(writable)]
        first = self.client.next_turn() % len(writable)
        in_turn = {endpoint.target: endpoint for endpoint in writable[first:] + writable[:first]}
        return in_turn[self._proxies.choose(list(in_turn))]


class Producer:
    """
    Sends one-phase messages.

    Args:
        clock: gives seconds; it never goes back.
    """

    def __init__(self, proxies: ProxySender, ports: PortSender, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = proxies.client
        self._proxies = proxies
        self._ports = ports
        self._clock = clock

    def send(self, messages: Sequence[Outgoing], topics: Sequence[TopicSpec]) -> list[SendResult]:
        """Send messages, those of one key one after the other."""
        pairs = list(zip(messages, topics, strict=True))
        chains: dict[object, list[int]] = {}
        for place, (message, topic) in enumerate(pairs):
            chains.setdefault((topic.name, message.key) if topic.type is TopicType.FIFO else place, []).append(place)
        outcomes: list[SendResult] = [HELD] * len(pairs)
        deadline = self._clock() + SEND_SECONDS

        async def send_chain(chain: list[int]) -> None:
            for place in chain:
                outcomes[place] = NOT_BEGUN if self._clock() >= deadline else await self._send(*pairs[place])
                if outcomes[place].status is not SendStatus.ACCEPTED:  # what stands behind it must not overtake it
                    return

        self._client.run(pipelined(list(chains.values()), send_chain, at_once=self._client.options.in_flight))
        return outcomes

    async def _send(self, message: Outgoing, topic: TopicSpec) -> SendResult:
        is_direct = topic.type is TopicType.NORMAL and self._client.ports.are_known
        send: Callable[..., Awaitable[tuple[Any, Any]]] = self._ports.send if is_direct else self._proxies.send
        _, sent = await send(message, topic, message.message_id)
        return sent if isinstance(sent, SendResult) else ACCEPTED
