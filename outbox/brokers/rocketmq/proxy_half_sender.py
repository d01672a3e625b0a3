"""
Sends, commits and rolls back half messages through the proxy: for `OPTIONS["UNCONFIRMED_ENDS"]`, if no broker can be reached.

A proxy in cluster mode forwards a COMMIT without waiting for the broker, so its OK does not say that the broker has received it.
If the broker dies then, the COMMIT is lost. If later no check-back is answered either, the message is lost.
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

REMEMBER_SECONDS = 60.0  # how long a sent half message is remembered; the proxy forgets it after 30 s

RESOLUTIONS = {
    Resolution.COMMIT: definition.TransactionResolution.COMMIT,
    Resolution.ROLLBACK: definition.TransactionResolution.ROLLBACK,
}


class ProxyHalfSender(HalfSender):
    """
    Sends and ends half messages through the proxy. To end a half message is to commit it or roll it back.

    Args:
        clock: a monotonic clock in seconds.
    """

    def __init__(self, sender: ProxySender, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(sender.client, clock)
        self._sender = sender
        self._sent: dict[str, tuple[float, Endpoint, str]] = {}  # half id -> when it was sent, its proxy, the proxy's id

    def look_up(self, halves: Sequence[HalfRef]) -> list[HalfStatus]:
        """
        Return UNKNOWN for each half message within CHECK_HORIZON, while a check-back may still settle it, and GONE after that.

        A proxy offers no look-up, so this is a guess. A message that is GONE is sent again, so it is not lost, but may be
        duplicated.
        """
        oldest = datetime.now(UTC) - self._client.options.check_horizon
        return [
            HalfStatus.GONE if half.decided_at is not None and half.decided_at < oldest else HalfStatus.UNKNOWN for half in halves
        ]

    async def _send(self, message: Outgoing, topic: TopicSpec, wire_id: str) -> SendResult:
        now = self._clock()
        while self._sent and self._sent[oldest := next(iter(self._sent))][0] < now - REMEMBER_SECONDS:
            del self._sent[oldest]
        endpoint, sent = await self._sender.send(message, topic, wire_id)
        if isinstance(sent, SendResult):
            return sent
        self._sent[wire_id] = now, cast("Endpoint", endpoint), sent.transaction_id
        return SendResult(SendStatus.ACCEPTED, half_id=wire_id)

    async def _end(self, half: HalfRef, resolution: Resolution, deadline: float) -> SendResult:
        if self._clock() >= deadline:
            return TOO_LATE
        if half.half_id not in self._sent:
            return SendResult(SendStatus.ACCEPTED, ended=Ended.NOT_FOUND, reason="Not sent by this process, or ended already.")
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
            if error.code == Code.INTERNAL_SERVER_ERROR:  # the proxy has forgotten the half message
                return SendResult(SendStatus.ACCEPTED, ended=Ended.NOT_FOUND, reason=f"RocketMQ says {error}.")
            return SendResult(SendStatus.UNSURE, reason=f"RocketMQ says {error}.")
        except Exception as error:  # not retried, since the COMMIT may have arrived
            return status_of(error)
        return SendResult(SendStatus.ACCEPTED, ended=ENDED[resolution])
