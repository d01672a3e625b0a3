"""
Half messages, sent and ended at the brokers' own ports, which confirm an end.

A confirmed COMMIT is as durable as a confirmed send. No request is retried here: an end without an answer may have taken
effect, or may do so later, so the half message is looked up before it is ended again (`half_lookup.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from outbox.brokers.base import Ended, HalfRef, HalfStatus, Outgoing, SendResult, SendStatus
from outbox.brokers.rocketmq.half_lookup import HalfLookup
from outbox.brokers.rocketmq.half_sender import ENDED, HalfSender
from outbox.brokers.rocketmq.places import HalfPlace
from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.connection import NoAnswer, NotConnected
from outbox.brokers.rocketmq.remoting.frames import RemotingError
from outbox.brokers.rocketmq.remoting_sender import RemotingSender
from outbox.brokers.rocketmq.statuses import status_of_end
from outbox.brokers.validation import TOO_LATE
from outbox.message import Resolution, TopicSpec

KINDS = {Resolution.COMMIT: requests.COMMIT_TYPE, Resolution.ROLLBACK: requests.ROLLBACK_TYPE}

NOT_FOUND = SendResult(SendStatus.ACCEPTED, ended=Ended.NOT_FOUND, reason="The broker does not find it by its id.")


class RemotingHalfSender(HalfSender):
    """
    Sends and ends half messages at the brokers' own ports.

    Args:
        clock: a monotonic clock in seconds.
    """

    def __init__(self, sender: RemotingSender, half_lookup: HalfLookup, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(sender.client, clock)
        self._sender = sender
        self._half_lookup = half_lookup

    def look_up(self, halves: Sequence[HalfRef]) -> list[HalfStatus]:
        """Return the status of each half message, looked up at the brokers' own ports."""
        return self._half_lookup.look_up(halves)

    async def _send(self, message: Outgoing, topic: TopicSpec, wire_id: str) -> SendResult:
        broker, sent = await self._sender.send(message, topic, wire_id)
        if isinstance(sent, SendResult):
            return sent
        return SendResult(SendStatus.ACCEPTED, half_id=wire_id, place=str(HalfPlace.of_answer(broker, sent)))

    async def _end(self, half: HalfRef, resolution: Resolution, deadline: float) -> SendResult:
        try:
            # The place is that of the preceding look-up, of the send, or of the broker's index, in this order.
            looked_up = self._half_lookup.found.pop(half.half_id, None)
            place = looked_up or HalfPlace.read(half.place) or await self._half_lookup.place_of(half)
        except (ConnectionError, RemotingError) as error:
            return SendResult(SendStatus.UNAVAILABLE, reason=f"Not ended, since its place cannot be looked up: {error}")
        if place is None:
            return NOT_FOUND
        try:
            request = requests.end(half.topic, half.half_id, place.queue_offset, place.log_offset, KINDS[resolution])
            address = (await self._client.remoting.addresses(half.topic)).get(place.broker)
            if address is None:
                reason = f"Broker {place.broker} does not serve topic {half.topic} at present."
                return SendResult(SendStatus.UNAVAILABLE, reason=reason)
            if self._clock() < deadline:
                await self._client.remoting.connect(address)  # before the deadline is compared, since connecting takes time
            if self._clock() >= deadline:
                return TOO_LATE
            answer = await self._client.remoting.ask(address, request)
        except NotConnected as error:
            self._client.remoting.invalidate(half.topic)
            return SendResult(SendStatus.UNAVAILABLE, reason=f"Not ended: {error}")
        except NoAnswer as error:
            return SendResult(SendStatus.UNSURE, reason=f"The end was not answered: {error}")
        return status_of_end(answer, ENDED[resolution])
