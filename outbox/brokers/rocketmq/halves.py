"""
Half messages, sent to the brokers' own ports and ended there, where an end is answered.

An answered COMMIT is stored as firmly as an answered send. Nothing is said again here: an end that got no answer may have
been done, or be done later, so whoever ends next looks first (`unanswered.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from outbox.brokers.base import Ended, HalfRef, HalfStatus, Outgoing, SendResult, SendStatus
from outbox.brokers.rocketmq.half_sender import ENDED, HalfSender
from outbox.brokers.rocketmq.places import Place
from outbox.brokers.rocketmq.port_sender import PortSender
from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.connection import NoAnswer, NotConnected
from outbox.brokers.rocketmq.remoting.frames import RemotingError
from outbox.brokers.rocketmq.statuses import status_of_end
from outbox.brokers.rocketmq.unanswered import Unanswered
from outbox.brokers.validation import TOO_LATE
from outbox.message import Resolution, TopicSpec

KINDS = {Resolution.COMMIT: requests.COMMIT_TYPE, Resolution.ROLLBACK: requests.ROLLBACK_TYPE}

NO_PLACE = SendResult(SendStatus.ACCEPTED, ended=Ended.NOT_FOUND, reason="The broker does not find it by its id.")


class Halves(HalfSender):
    """
    Sends and ends half messages at the brokers' own ports.

    Args:
        clock: gives seconds; it never goes back.
    """

    def __init__(self, sender: PortSender, unanswered: Unanswered, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(sender.client, clock)
        self._sender = sender
        self._unanswered = unanswered

    def look_up(self, halves: Sequence[HalfRef]) -> list[HalfStatus]:
        """Return where each half message stands, as the brokers' own ports say."""
        return self._unanswered.look_up(halves)

    async def _send(self, message: Outgoing, topic: TopicSpec, wire_id: str) -> SendResult:
        broker, sent = await self._sender.send(message, topic, wire_id)
        if isinstance(sent, SendResult):
            return sent
        return SendResult(SendStatus.ACCEPTED, half_id=wire_id, place=str(Place.of_answer(broker, sent)))

    async def _end(self, half: HalfRef, resolution: Resolution, deadline: float) -> SendResult:
        try:
            # Where it was just looked up, or where it was sent to, or where the index has it.
            looked_up = self._unanswered.found.pop(half.half_id, None)
            place = looked_up or Place.read(half.place) or await self._unanswered.place_of(half)
        except (ConnectionError, RemotingError) as error:
            return SendResult(SendStatus.UNAVAILABLE, reason=f"Not ended, since it cannot be found: {error}")
        if place is None:
            return NO_PLACE
        try:
            request = requests.end(half.topic, half.half_id, place.queue_offset, place.log_offset, KINDS[resolution])
            address = (await self._client.ports.addresses(half.topic)).get(place.broker)
            if address is None:
                reason = f"Broker {place.broker} does not serve topic {half.topic} now."
                return SendResult(SendStatus.UNAVAILABLE, reason=reason)
            if self._clock() < deadline:
                await self._client.ports.reach(address)  # it may take a while
            if self._clock() >= deadline:
                return TOO_LATE
            answer = await self._client.ports.ask(address, request)
        except NotConnected as error:
            self._client.ports.doubt(half.topic)
            return SendResult(SendStatus.UNAVAILABLE, reason=f"Not ended: {error}")
        except NoAnswer as error:
            return SendResult(SendStatus.UNSURE, reason=f"Its end is not answered: {error}")
        return status_of_end(answer, ENDED[resolution])
