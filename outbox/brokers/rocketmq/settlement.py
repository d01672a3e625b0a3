"""Settles deliveries: acknowledges them, or changes how long they stay invisible, which renews or releases them."""

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

# Parts of the server's error text about a delivery that has expired, or that its broker no longer has.
EXPIRED_TEXTS = ("expired", "status is abnormal")

# The suffix of the server's group for fifo topics, which need a separate group, since RocketMQ keeps order for all topics of a
# group or for none.
ORDERED_SUFFIX = "_fifo"


def group_name(group: str, topic: TopicSpec) -> str:
    """Return the name that a group has on the server for a topic."""
    return group + ORDERED_SUFFIX if topic.type is TopicType.FIFO else group


def invisible_milliseconds(span: timedelta) -> int:
    """Return a duration in milliseconds, within the server's limits."""
    return min(max(span, MIN_INVISIBLE), MAX_INVISIBLE) // timedelta(milliseconds=1)


class Settlement:
    """Settles deliveries through one client."""

    def __init__(self, client: RocketMQClient, topics: Mapping[str, TopicSpec]) -> None:
        self._client = client
        self._topics = topics

    def ack(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """Acknowledge deliveries. False: it has expired, or its request failed. Raises BrokerUnavailable if all requests fail."""
        return [answer is True for answer in self._client.run(_call_all(self.ack_one, deliveries))]

    def renew(self, deliveries: Sequence[Delivery], invisible_for: timedelta) -> list[Delivery | None]:
        """
        Renew deliveries. A delivery whose request fails is returned unchanged.

        Raises:
            BrokerUnavailable: all requests fail.
        """
        answers = self._client.run(_call_all(partial(self.change_invisible, span=invisible_for), deliveries))
        return [
            delivery if isinstance(answer, Exception) else answer for delivery, answer in zip(deliveries, answers, strict=True)
        ]

    async def ack_one(self, delivery: Delivery) -> bool:
        """Acknowledge a delivery. Return False if it has expired. Call it only in the loop's thread."""
        entry = service.AckMessageEntry(message_id=delivery.message_id, receipt_handle=delivery.receipt)
        request = service.AckMessageRequest(**self._group_and_topic(delivery), entries=[entry])
        return await self._call(delivery, "AckMessage", request) is not None

    async def change_invisible(self, delivery: Delivery, span: timedelta) -> Delivery | None:
        """Make a delivery invisible for a time from now. None: it has expired. Call it only in the loop's thread."""
        request = service.ChangeInvisibleDurationRequest(
            **self._group_and_topic(delivery), receipt_handle=delivery.receipt, message_id=delivery.message_id
        )
        request.invisible_duration.FromMilliseconds(invisible_milliseconds(span))
        answer = await self._call(delivery, "ChangeInvisibleDuration", request)
        return replace(delivery, receipt=_renewed_receipt(delivery.receipt, answer.receipt_handle)) if answer else None

    async def return_deliveries(self, deliveries: Sequence[Delivery]) -> None:
        """Return unused deliveries to the server, before they expire. Call it only in the loop's thread."""
        answers = await asyncio.gather(
            *(self.change_invisible(delivery, timedelta()) for delivery in deliveries), return_exceptions=True
        )
        if failed := [answer for answer in answers if isinstance(answer, Exception)]:
            logger.info(
                "%s of %s messages could not be returned to RocketMQ, which redelivers them later: %s",
                len(failed),
                len(answers),
                describe(failed[0]),
            )

    async def _call(self, delivery: Delivery, name: str, request: Any) -> Any:
        """Make a call about a delivery. None: it has expired."""
        queues = await self._client.routes.of(delivery.topic)
        try:
            return await self._client.call(queues[0].endpoint, name, request, role=request.group.name)
        except StatusError as error:
            if error.code == Code.INVALID_RECEIPT_HANDLE or any(words in error.text for words in EXPIRED_TEXTS):
                return None
            raise

    def _group_and_topic(self, delivery: Delivery) -> dict[str, Any]:
        group = group_name(delivery.group, self._topics[delivery.topic])
        return {"group": self._client.resource(group), "topic": self._client.resource(delivery.topic)}


async def _call_all(call: Callable[[Delivery], Awaitable[T]], deliveries: Sequence[Delivery]) -> list[T | Exception]:
    """
    Make a call about each delivery, concurrently. Return the answers; in place of one, the error if the call failed.

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
        raise BrokerUnavailable(f"RocketMQ accepted no acknowledgement or renewal: {describe(failed[0])}") from failed[0]
    if failed:
        logger.warning(
            "RocketMQ did not accept %s of %s acknowledgements or renewals: %s", len(failed), len(answers), describe(failed[0])
        )
    return answers


def _renewed_receipt(old: str, new: str) -> str:
    """
    Return a renewed receipt, and correct two fields that a proxy in local mode sets wrongly.

    The first field is the queue offset at which the receive began. After a renewal the receipt is about one message, so this must
    be the queue offset of that message, the eighth field. The proxy leaves the old value, and with it the broker would accept
    acknowledgements and renewals that have no effect. The ninth field is the message's log offset, and the proxy inserts another
    number before it.
    """
    parts = new.split(" ")
    return " ".join([*(parts[7:8] or parts[:1]), *parts[1:8], *old.split(" ")[8:9]])
