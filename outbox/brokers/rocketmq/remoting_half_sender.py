"""
Sends half messages directly to the brokers, and commits or rolls them back there; the brokers confirm this.

A confirmed COMMIT is as durable as a confirmed send. No request is retried here: a COMMIT without an answer may have taken
effect, or may do so later, so the half message is looked up before it is committed again (`half_lookup.py`).
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

END_TYPES = {Resolution.COMMIT: requests.COMMIT_TYPE, Resolution.ROLLBACK: requests.ROLLBACK_TYPE}

NOT_FOUND = SendResult(SendStatus.ACCEPTED, ended=Ended.NOT_FOUND, reason="No broker finds the half message by its id.")


class RemotingHalfSender(HalfSender):
    """
    Sends and ends half messages over the remoting protocol. To end a half message is to commit it or roll it back.

    Args:
        clock: a monotonic clock in seconds.
    """

    def __init__(self, sender: RemotingSender, half_lookup: HalfLookup, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(sender.client, clock)
        self._sender = sender
        self._half_lookup = half_lookup

    def look_up(self, halves: Sequence[HalfRef]) -> list[HalfStatus]:
        """Return the status of each half message, looked up at the brokers."""
        return self._half_lookup.look_up(halves)

    async def _send(self, message: Outgoing, topic: TopicSpec, wire_id: str) -> SendResult:
        broker, sent = await self._sender.send(message, topic, wire_id)
        if isinstance(sent, SendResult):
            return sent
        return SendResult(SendStatus.ACCEPTED, half_id=wire_id, place=str(HalfPlace.of_answer(broker, sent)))

    async def _end(self, half: HalfRef, resolution: Resolution, deadline: float) -> SendResult:
        try:
            # The place comes from the preceding look-up, otherwise from the answer to the send, otherwise from the broker's
            # index.
            looked_up = self._half_lookup.places.pop(half.half_id, None)
            place = looked_up or HalfPlace.read(half.place) or await self._half_lookup.place_of(half)
        except (ConnectionError, RemotingError) as error:
            reason = f"The {resolution} was not sent, since the half message cannot be looked up: {error}"
            return SendResult(SendStatus.UNAVAILABLE, reason=reason)
        if place is None:
            return NOT_FOUND
        try:
            request = requests.end(half.topic, half.half_id, place.queue_offset, place.log_offset, END_TYPES[resolution])
            address = (await self._client.remoting.addresses(half.topic)).get(place.broker)
            if address is None:
                reason = f"Broker {place.broker} does not serve topic {half.topic} at present."
                return SendResult(SendStatus.UNAVAILABLE, reason=reason)
            if self._clock() < deadline:
                await self._client.remoting.connect(address)  # this takes time, so the deadline is checked again afterwards
            if self._clock() >= deadline:
                return TOO_LATE
            answer = await self._client.remoting.ask(address, request)
        except NotConnected as error:
            self._client.remoting.invalidate(half.topic)
            return SendResult(SendStatus.UNAVAILABLE, reason=f"The {resolution} was not sent: {error}")
        except NoAnswer as error:
            return SendResult(SendStatus.UNSURE, reason=f"The broker did not answer the {resolution}: {error}")
        return status_of_end(answer, ENDED[resolution])
