"""
Half messages, sent and ended through the proxy: for `OPTIONS["UNCONFIRMED_ENDS"]`, if no broker's own port can be reached.

A proxy in cluster mode forwards an end one-way: its OK does not say that the broker has received it. If the broker dies at that
moment, the COMMIT is lost; if no check-back is answered later either, the message is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import cast

from outbox.brokers.base import Ended, HalfRef, HalfStatus, Outgoing, SendResult, SendStatus
from outbox.brokers.rocketmq.endpoints import Endpoint
from outbox.brokers.rocketmq.errors import StatusError
from outbox.brokers.rocketmq.half_sender import ENDED, HalfSender
from outbox.brokers.rocketmq.sender import ProxySender
from outbox.brokers.rocketmq.statuses import status_of
from outbox.brokers.rocketmq.stubs import Code, definition, service
from outbox.brokers.validation import TOO_LATE
from outbox.message import Resolution, TopicSpec

PROXY_SECONDS = 60.0  # keep half messages this long; the proxy forgets them after 30 s

RESOLUTIONS = {
    Resolution.COMMIT: definition.TransactionResolution.COMMIT,
    Resolution.ROLLBACK: definition.TransactionResolution.ROLLBACK,
}


class ProxyHalfSender(HalfSender):
    """
    Sends and ends half messages through the proxy.

    Args:
        clock: a monotonic clock in seconds.
    """

    def __init__(self, sender: ProxySender, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(sender.client, clock)
        self._sender = sender
        self._sent: dict[str, tuple[float, Endpoint, str]] = {}  # half id -> when (by the clock), its proxy, its id there

    def look_up(self, halves: Sequence[HalfRef]) -> list[HalfStatus]:
        """
        Return UNKNOWN for each half message while a check-back may settle it, and GONE after that.

        Nothing can be looked up without the brokers' own ports. A message that counts as gone is sent again, so it is not lost,
        but it may be duplicated.
        """
        before = datetime.now(UTC) - self._client.options.check_horizon
        return [
            HalfStatus.GONE if half.decided_at is not None and half.decided_at < before else HalfStatus.UNKNOWN for half in halves
        ]

    async def _send(self, message: Outgoing, topic: TopicSpec, wire_id: str) -> SendResult:
        at = self._clock()
        while self._sent and self._sent[oldest := next(iter(self._sent))][0] < at - PROXY_SECONDS:
            del self._sent[oldest]
        endpoint, sent = await self._sender.send(message, topic, wire_id)
        if isinstance(sent, SendResult):
            return sent
        self._sent[wire_id] = at, cast("Endpoint", endpoint), sent.transaction_id
        return SendResult(SendStatus.ACCEPTED, half_id=wire_id)

    async def _end(self, half: HalfRef, resolution: Resolution, deadline: float) -> SendResult:
        if self._clock() >= deadline:
            return TOO_LATE
        if half.half_id not in self._sent:
            return SendResult(SendStatus.ACCEPTED, ended=Ended.NOT_FOUND, reason="Not sent by this process, or ended before.")
        _, endpoint, transaction_id = self._sent.pop(half.half_id)
        request = service.EndTransactionRequest(
            topic=self._client.resource(half.topic),
            message_id=half.half_id,
            transaction_id=transaction_id,
            resolution=RESOLUTIONS[resolution],
            source=definition.TransactionSource.SOURCE_CLIENT,
        )
        try:
            await self._client.call(endpoint, "EndTransaction", request)
        except StatusError as error:
            if error.code == Code.INTERNAL_SERVER_ERROR:  # the proxy no longer has it: ended, or left to the check-back
                return SendResult(SendStatus.ACCEPTED, ended=Ended.NOT_FOUND, reason=f"RocketMQ says {error}.")
            return SendResult(SendStatus.UNSURE, reason=f"RocketMQ says {error}.")
        except Exception as error:  # the COMMIT may have arrived, and is not repeated
            return status_of(error)
        return SendResult(SendStatus.ACCEPTED, ended=ENDED[resolution])
