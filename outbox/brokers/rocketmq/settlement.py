"""How deliveries end, done, tried again later, or put aside; and how they are held longer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import grpc

from outbox.brokers.base import Delivery
from outbox.brokers.rocketmq.client import Client
from outbox.brokers.rocketmq.errors import StatusError, describe
from outbox.brokers.rocketmq.stubs import Code, service
from outbox.errors import BrokerUnavailable
from outbox.message import TopicSpec, TopicType

T = TypeVar("T")

FORWARD_SECONDS = 30.0

ORDERED = "_fifo"  # RocketMQ orders a whole group or not at all, so fifo topics are read by a group of their own


def group_name(group: str, topic: TopicSpec) -> str:
    """Give the server's name of a group that reads a topic."""
    return group + ORDERED if topic.type is TopicType.FIFO else group


class Finishing:
    """Ends deliveries over one link."""

    def __init__(self, link: Client, topics: Mapping[str, TopicSpec]) -> None:
        self._client = link
        self._topics = topics

    def ack(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """Finish deliveries. Raises BrokerUnavailable."""
        return self._client.run(self._all([self.finish(delivery) for delivery in deliveries]))

    def renew(self, deliveries: Sequence[Delivery], invisible_for: timedelta) -> list[Delivery | None]:
        """Hold deliveries for that long from now. Raises BrokerUnavailable."""
        seconds = invisible_for.total_seconds()
        return self._client.run(self._renewed_ones(deliveries, seconds))

    def retry(self, delivery: Delivery, after: timedelta) -> bool:
        """Have a delivery come again after that time. Raises BrokerUnavailable."""
        [is_held] = self._client.run(self._all([self.change(delivery, after.total_seconds())]))
        return is_held

    def dead_letter(self, delivery: Delivery) -> bool:
        """Have the server move the message to the group's dead letters. Raises BrokerUnavailable."""
        [is_held] = self._client.run(self._all([self._forward(delivery)]))
        return is_held

    async def _renewed_ones(self, deliveries: Sequence[Delivery], seconds: float) -> list[Delivery | None]:
        """Renew each; without an answer it is returned as it was. Raises BrokerUnavailable where none has one."""
        works = (self._prolonged(delivery, seconds) for delivery in deliveries)
        answers = await asyncio.gather(*works, return_exceptions=True)
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        for error in failed:
            if not isinstance(error, (grpc.aio.AioRpcError, StatusError)):
                raise error
        if failed and len(failed) == len(answers):
            raise BrokerUnavailable(f"RocketMQ did not take the answer: {describe(failed[0])}") from failed[0]
        return [
            delivery if isinstance(answer, BaseException) else answer
            for delivery, answer in zip(deliveries, answers, strict=True)
        ]

    async def _all(self, works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        try:
            return list(await asyncio.gather(*works))
        except (grpc.aio.AioRpcError, StatusError) as error:
            raise BrokerUnavailable(f"RocketMQ did not take the answer: {describe(error)}") from error

    async def finish(self, delivery: Delivery) -> bool:
        """Finish a delivery. In the loop's thread only."""
        entry = service.AckMessageEntry(message_id=delivery.message_id, receipt_handle=delivery.receipt)
        request = service.AckMessageRequest(**self._names(delivery), entries=[entry])
        return await self._said(delivery, "AckMessage", request) is not None

    async def change(self, delivery: Delivery, seconds: float) -> bool:
        """Have a delivery come again after that time. In the loop's thread only."""
        return await self._prolonged(delivery, seconds) is not None

    async def _prolonged(self, delivery: Delivery, seconds: float = FORWARD_SECONDS) -> Delivery | None:
        """Hold a delivery that long from now. None: its time was over."""
        request = service.ChangeInvisibleDurationRequest(
            **self._names(delivery), receipt_handle=delivery.receipt, message_id=delivery.message_id
        )
        request.invisible_duration.FromMilliseconds(max(1, round(seconds * 1000)))
        answer = await self._said(delivery, "ChangeInvisibleDuration", request)
        return replace(delivery, receipt=_renewed(delivery.receipt, answer.receipt_handle)) if answer else None

    async def _forward(self, delivery: Delivery) -> bool:
        """Forward a delivery if it is still held, which the forwarding itself does not ask."""
        held = await self._prolonged(delivery)
        if held is None:
            return False
        delivery = held
        request = service.ForwardMessageToDeadLetterQueueRequest(
            **self._names(delivery),
            receipt_handle=delivery.receipt,
            message_id=delivery.message_id,
            delivery_attempt=delivery.attempt,
            max_delivery_attempts=delivery.attempt,
        )
        return await self._said(delivery, "ForwardMessageToDeadLetterQueue", request) is not None

    async def _said(self, delivery: Delivery, name: str, request: Any) -> Any:
        """Make a call about a delivery. None: its time was over."""
        queues = await self._client.routes.of(delivery.topic)
        try:
            return await self._client.call(queues[0].endpoint, name, request, role=request.group.name)
        except StatusError as error:
            if error.code == Code.INVALID_RECEIPT_HANDLE or "expired" in error.text:
                return None
            raise

    def _names(self, delivery: Delivery) -> dict[str, Any]:
        group = group_name(delivery.group, self._topics[delivery.topic])
        return {"group": self._client.resource(group), "topic": self._client.resource(delivery.topic)}


def _renewed(old: str, new: str) -> str:
    """
    Put the message's place in the log, the ninth part of a receipt, back where it was.

    A proxy in local mode inserts another number before it, and would forward the message that lies there.
    """
    return " ".join([*new.split(" ")[:8], *old.split(" ")[8:9]])
