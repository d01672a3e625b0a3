"""How deliveries end, done, tried again later, or put aside; and how they are held longer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import grpc

from outbox.brokers.base import Delivery
from outbox.brokers.rocketmq.client import Client
from outbox.brokers.rocketmq.errors import StatusError, describe
from outbox.brokers.rocketmq.stubs import Code, service
from outbox.errors import BrokerUnavailable
from outbox.logs import get_logger
from outbox.message import TopicSpec, TopicType

logger = get_logger(__name__)

T = TypeVar("T")

# Longer the server hides no message: maxInvisibleTimeMills of its proxies. Shorter than a millisecond it cannot say.
MOST_HIDDEN = timedelta(hours=12)
LEAST_HIDDEN = timedelta(milliseconds=1)

# What the server says of a delivery that it will not end: its time is over, or its broker finds it no more.
TOO_LATE = ("expired", "status is abnormal")

FORWARD = timedelta(seconds=30)

ORDERED = "_fifo"  # RocketMQ orders a whole group or not at all, so fifo topics are read by a group of their own


def group_name(group: str, topic: TopicSpec) -> str:
    """Return the server's name of a group that reads a topic."""
    return group + ORDERED if topic.type is TopicType.FIFO else group


def hidden_milliseconds(span: timedelta) -> int:
    """Return how long the server is to hide a message: that long, or what comes nearest to it of what it takes."""
    return min(max(span, LEAST_HIDDEN), MOST_HIDDEN) // timedelta(milliseconds=1)


class Finishing:
    """Ends deliveries over one client."""

    def __init__(self, client: Client, topics: Mapping[str, TopicSpec]) -> None:
        self._client = client
        self._topics = topics

    def ack(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """Finish deliveries. False: too late, or nobody knows. Raises BrokerUnavailable where none has an answer."""
        return [answer is True for answer in self._client.run(_answers(self.finish, deliveries))]

    def renew(self, deliveries: Sequence[Delivery], invisible_for: timedelta) -> list[Delivery | None]:
        """
        Hold deliveries for that long from now; one without an answer is returned as it was.

        Raises:
            BrokerUnavailable: none has an answer.
        """
        answers = self._client.run(_answers(partial(self.change, span=invisible_for), deliveries))
        return [
            delivery if isinstance(answer, Exception) else answer for delivery, answer in zip(deliveries, answers, strict=True)
        ]

    def retry(self, delivery: Delivery, after: timedelta) -> bool:
        """Return a delivery to its group, to come again after that time. Raises BrokerUnavailable."""
        [answer] = self._client.run(_answers(partial(self.change, span=after), [delivery]))
        return answer is not None

    def dead_letter(self, delivery: Delivery) -> bool:
        """Ask the server to move the message to the group's dead letters. Raises BrokerUnavailable."""
        [answer] = self._client.run(_answers(self._forward, [delivery]))
        return answer is True

    async def finish(self, delivery: Delivery) -> bool:
        """Finish a delivery. In the loop's thread only."""
        entry = service.AckMessageEntry(message_id=delivery.message_id, receipt_handle=delivery.receipt)
        request = service.AckMessageRequest(**self._names(delivery), entries=[entry])
        return await self._said(delivery, "AckMessage", request) is not None

    async def change(self, delivery: Delivery, span: timedelta) -> Delivery | None:
        """Hide a delivery's message for that long from now. None: its time was over. In the loop's thread only."""
        request = service.ChangeInvisibleDurationRequest(
            **self._names(delivery), receipt_handle=delivery.receipt, message_id=delivery.message_id
        )
        request.invisible_duration.FromMilliseconds(hidden_milliseconds(span))
        answer = await self._said(delivery, "ChangeInvisibleDuration", request)
        return replace(delivery, receipt=_renewed(delivery.receipt, answer.receipt_handle)) if answer else None

    async def give_back(self, deliveries: Sequence[Delivery]) -> None:
        """Hand back what no consumer was shown; else it comes again when its time is over. In the loop's thread only."""
        answers = await asyncio.gather(*(self.change(one, timedelta()) for one in deliveries), return_exceptions=True)
        if failed := [answer for answer in answers if isinstance(answer, Exception)]:
            logger.info("%s of %s messages could not be handed back: %s", len(failed), len(answers), describe(failed[0]))

    async def _forward(self, delivery: Delivery) -> bool:
        """Forward a delivery if it is still held, which the forwarding itself does not ask."""
        held = await self.change(delivery, FORWARD)
        if held is None:
            return False
        request = service.ForwardMessageToDeadLetterQueueRequest(
            **self._names(held),
            receipt_handle=held.receipt,
            message_id=held.message_id,
            delivery_attempt=held.attempt,
            max_delivery_attempts=held.attempt,
        )
        return await self._said(held, "ForwardMessageToDeadLetterQueue", request) is not None

    async def _said(self, delivery: Delivery, name: str, request: Any) -> Any:
        """Make a call about a delivery. None: the server will not, its time was over."""
        queues = await self._client.routes.of(delivery.topic)
        try:
            return await self._client.call(queues[0].endpoint, name, request, role=request.group.name)
        except StatusError as error:
            if error.code == Code.INVALID_RECEIPT_HANDLE or any(words in error.text for words in TOO_LATE):
                return None
            raise

    def _names(self, delivery: Delivery) -> dict[str, Any]:
        group = group_name(delivery.group, self._topics[delivery.topic])
        return {"group": self._client.resource(group), "topic": self._client.resource(delivery.topic)}


async def _answers(call: Callable[[Delivery], Awaitable[T]], deliveries: Sequence[Delivery]) -> list[T | Exception]:
    """
    Make a call about each delivery, all at once; return the answers, or what went wrong.

    Raises:
        BrokerUnavailable: all of them went wrong.
    """
    found: list[T | Exception] = []
    failed: list[Exception] = []
    for answer in await asyncio.gather(*map(call, deliveries), return_exceptions=True):
        if isinstance(answer, (grpc.aio.AioRpcError, StatusError)):
            failed.append(answer)
        elif isinstance(answer, BaseException):
            raise answer
        found.append(answer)
    if failed and len(failed) == len(found):
        raise BrokerUnavailable(f"RocketMQ did not take the answer: {describe(failed[0])}") from failed[0]
    if failed:
        logger.warning("RocketMQ did not take %s of %s answers: %s", len(failed), len(found), describe(failed[0]))
    return found


def _renewed(old: str, new: str) -> str:
    """
    Return a renewed receipt with those of its parts put right in which a proxy in local mode errs.

    The first is the place in its queue where begins what was hidden together: after a renewal one message alone, whose place is
    the eighth. The proxy leaves there the first message that was received with it, and the broker then takes what is said of the
    delivery, and ends nothing. The ninth is the message's place in the log: the proxy inserts another number before it, and would
    forward the message that lies there.
    """
    parts = new.split(" ")
    return " ".join([*(parts[7:8] or parts[:1]), *parts[1:8], *old.split(" ")[8:9]])
