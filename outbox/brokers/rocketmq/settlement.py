"""Settlement of deliveries: acknowledgement, and change of the invisible time, which renews and releases."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import grpc
from msgspec.structs import replace

from outbox.brokers.base import Delivery
from outbox.brokers.rocketmq.client import RocketMQClient
from outbox.brokers.rocketmq.errors import StatusError, describe
from outbox.brokers.rocketmq.stubs import Code, service
from outbox.errors import BrokerUnavailable
from outbox.logs import get_logger
from outbox.message import TopicSpec, TopicType

logger = get_logger(__name__)

T = TypeVar("T")

# The limits of an invisible duration: maxInvisibleTimeMills of the proxies, and the protocol's resolution.
MAX_INVISIBLE = timedelta(hours=12)
MIN_INVISIBLE = timedelta(milliseconds=1)

# The server's answer about a delivery that has expired, or that its broker no longer has.
TOO_LATE = ("expired", "status is abnormal")

ORDERED = "_fifo"  # RocketMQ keeps order for a whole group or not at all, so fifo topics have a group of their own


def group_name(group: str, topic: TopicSpec) -> str:
    """Return the name that a group has on the server for a topic."""
    return group + ORDERED if topic.type is TopicType.FIFO else group


def invisible_milliseconds(span: timedelta) -> int:
    """Return a duration in milliseconds, within the server's limits."""
    return min(max(span, MIN_INVISIBLE), MAX_INVISIBLE) // timedelta(milliseconds=1)


class Settlement:
    """Settles deliveries through one client."""

    def __init__(self, client: RocketMQClient, topics: Mapping[str, TopicSpec]) -> None:
        self._client = client
        self._topics = topics

    def ack(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """Acknowledge deliveries. False: too late, or not answered. Raises BrokerUnavailable if none is answered."""
        return [answer is True for answer in self._client.run(_answers(self.ack_one, deliveries))]

    def renew(self, deliveries: Sequence[Delivery], invisible_for: timedelta) -> list[Delivery | None]:
        """
        Renew deliveries; one whose request is not answered is returned unchanged.

        Raises:
            BrokerUnavailable: no request is answered.
        """
        answers = self._client.run(_answers(partial(self.change_invisible, span=invisible_for), deliveries))
        return [
            delivery if isinstance(answer, Exception) else answer for delivery, answer in zip(deliveries, answers, strict=True)
        ]

    async def ack_one(self, delivery: Delivery) -> bool:
        """Acknowledge a delivery. In the loop's thread only."""
        entry = service.AckMessageEntry(message_id=delivery.message_id, receipt_handle=delivery.receipt)
        request = service.AckMessageRequest(**self._group_and_topic(delivery), entries=[entry])
        return await self._call(delivery, "AckMessage", request) is not None

    async def change_invisible(self, delivery: Delivery, span: timedelta) -> Delivery | None:
        """Change how long a delivery stays invisible, from now. None: it has expired. In the loop's thread only."""
        request = service.ChangeInvisibleDurationRequest(
            **self._group_and_topic(delivery), receipt_handle=delivery.receipt, message_id=delivery.message_id
        )
        request.invisible_duration.FromMilliseconds(invisible_milliseconds(span))
        answer = await self._call(delivery, "ChangeInvisibleDuration", request)
        return replace(delivery, receipt=_renewed(delivery.receipt, answer.receipt_handle)) if answer else None

    async def return_deliveries(self, deliveries: Sequence[Delivery]) -> None:
        """Return deliveries that no consumer has seen, without waiting for them to expire. In the loop's thread only."""
        answers = await asyncio.gather(
            *(self.change_invisible(delivery, timedelta()) for delivery in deliveries), return_exceptions=True
        )
        if failed := [answer for answer in answers if isinstance(answer, Exception)]:
            logger.info("%s of %s messages could not be handed back: %s", len(failed), len(answers), describe(failed[0]))

    async def _call(self, delivery: Delivery, name: str, request: Any) -> Any:
        """Make a call about a delivery. None: it has expired."""
        queues = await self._client.routes.of(delivery.topic)
        try:
            return await self._client.call(queues[0].endpoint, name, request, role=request.group.name)
        except StatusError as error:
            if error.code == Code.INVALID_RECEIPT_HANDLE or any(words in error.text for words in TOO_LATE):
                return None
            raise

    def _group_and_topic(self, delivery: Delivery) -> dict[str, Any]:
        group = group_name(delivery.group, self._topics[delivery.topic])
        return {"group": self._client.resource(group), "topic": self._client.resource(delivery.topic)}


async def _answers(call: Callable[[Delivery], Awaitable[T]], deliveries: Sequence[Delivery]) -> list[T | Exception]:
    """
    Make a call about each delivery, concurrently. Return the answers, or the errors in their places.

    Raises:
        BrokerUnavailable: all calls failed.
    """
    answers: list[T | Exception] = []
    failed: list[Exception] = []
    for answer in await asyncio.gather(*map(call, deliveries), return_exceptions=True):
        if isinstance(answer, (grpc.aio.AioRpcError, StatusError)):
            failed.append(answer)
        elif isinstance(answer, BaseException):
            raise answer
        answers.append(answer)
    if failed and len(failed) == len(answers):
        raise BrokerUnavailable(f"RocketMQ accepted no settlement: {describe(failed[0])}") from failed[0]
    if failed:
        logger.warning("RocketMQ did not accept %s of %s settlements: %s", len(failed), len(answers), describe(failed[0]))
    return answers


def _renewed(old: str, new: str) -> str:
    """
    Return a renewed receipt, with two of its fields corrected that a proxy in local mode gets wrong.

    The first field is the queue offset at which the receive began. After a renewal the receipt is about one message, so this must
    be the message's own queue offset, the eighth field. The proxy leaves the old value, and the broker then accepts a settlement
    that has no effect. The ninth field is the message's log offset, and the proxy inserts another number before it.
    """
    parts = new.split(" ")
    return " ".join([*(parts[7:8] or parts[:1]), *parts[1:8], *old.split(" ")[8:9]])
