"""
Where half messages stand whose end was not answered.

A message is looked up by its half message's id. Found, it is visible. Not found proves something only where the half message
itself is found in the same way: after a crash a broker builds its newest index again from one file of its log, and what lies
before that is found by its id no more. Then its topic is read from the time of the half message on, and the half message is
looked at where it lies, whose id must be its own: a broker that was restored has another there.

Source: docs/explanation/not-found.md.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from outbox.brokers.base import HalfRef, HalfStanding
from outbox.brokers.rocketmq.client import Client
from outbox.brokers.rocketmq.pipelines import pipelined
from outbox.brokers.rocketmq.places import HALVES, Place
from outbox.brokers.rocketmq.reading import TooMuch, read_since
from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.connection import NotConnected
from outbox.brokers.rocketmq.remoting.frames import RemotingError, Request, Stored

logger = logging.getLogger(__name__)

# A broker that did not answer, or was frozen, does what waits at its port when it goes on, and indexes it a moment later.
SETTLE_SECONDS = 10.0

# Half messages are stored that long before the decision at most: a lease, and clocks that differ.
BEFORE_DECISION = timedelta(minutes=2)

# A half message whose place is not known went first: it was sent that soon behind the decision. Asked about it is later.
SENT_WITHIN = timedelta(seconds=3)

EMPTY = datetime.max.replace(tzinfo=UTC)  # a broker that has no message keeps everything since then

MOST_FOUND = 100_000  # places kept for the ends that follow


class Unanswered:
    """Looks half messages up. In the client's loop only, but for `look_up`."""

    def __init__(self, client: Client, settle_seconds: float = SETTLE_SECONDS) -> None:
        self._client = client
        self._settle_seconds = settle_seconds
        self.found: dict[str, Place] = {}  # of half messages that were looked up

    def look_up(self, halves: Sequence[HalfRef]) -> list[HalfStanding]:
        """Return where each stands; what cannot be asked is UNKNOWN."""
        return self._client.run(self._look_up(halves))

    async def place_of(self, half: HalfRef) -> Place | None:
        """Return where a half message lies: as it was looked up before, or by its id. Raises ConnectionError, RemotingError."""
        known = self.found.pop(half.half_id, None)
        if known is not None:
            return known
        for name, address in (await self._client.ports.addresses(half.topic)).items():
            for stored in await self._find(address, HALVES, half.half_id):
                return Place.of_stored(name, stored)
        return None

    async def is_visible(self, topic: str, half_id: str) -> bool:
        """Return whether the message of a half message is found in its topic. Raises ConnectionError, RemotingError."""
        for place in (await self._client.ports.addresses(topic)).values():
            if await self._find(place, topic, half_id):
                return True
        return False

    async def _look_up(self, halves: Sequence[HalfRef]) -> list[HalfStanding]:
        if len(self.found) > MOST_FOUND:
            self.found.clear()
        standings = await pipelined(halves, self._by_id, at_once=self._client.options.in_flight)
        for topic in {half.topic for half, known in zip(halves, standings, strict=True) if known is None}:
            lost = [half for half, known in zip(halves, standings, strict=True) if known is None and half.topic == topic]
            read = await self._by_reading(topic, lost)
            standings = [known or read.get(half.half_id) for half, known in zip(halves, standings, strict=True)]
        return [known or HalfStanding.UNKNOWN for known in standings]

    async def _by_id(self, half: HalfRef) -> HalfStanding | None:
        """Return where a half message stands as the index has it; None: the index does not have it."""
        try:
            brokers = await self._brokers_of(half)
            if brokers is None:
                return HalfStanding.UNKNOWN
            is_settled = True
            for address in brokers.values():
                if await self._find(address, half.topic, half.half_id):
                    return HalfStanding.VISIBLE
                is_settled = is_settled and self._client.ports.answering_for(address) >= self._settle_seconds
            if not is_settled:
                return HalfStanding.UNKNOWN
            for name, address in brokers.items():
                for stored in await self._find(address, HALVES, half.half_id):
                    self.found[half.half_id] = Place.of_stored(name, stored)
                    if _is_first(half, stored):
                        return HalfStanding.HIDDEN
        except (ConnectionError, RemotingError) as error:
            logger.warning("Half message %s of topic %s cannot be looked up: %s", half.half_id, half.topic, error)
            return HalfStanding.UNKNOWN
        return None

    async def _by_reading(self, topic: str, halves: Sequence[HalfRef]) -> dict[str, HalfStanding]:
        """Return where half messages stand that the index does not have, all of one topic."""
        try:
            return {half.half_id: await self._lies_at(half) for half in halves} | dict.fromkeys(
                await self._read(topic, halves, is_hidden=False), HalfStanding.VISIBLE
            )
        except (ConnectionError, RemotingError, TooMuch) as error:
            logger.warning("Topic %s cannot be read for half messages that were not ended: %s", topic, error)
            return {}

    async def _lies_at(self, half: HalfRef) -> HalfStanding:
        """Return whether a half message lies at its place, or in the queue of half messages; else what that proves."""
        place, address = Place.read(half.place), ""
        if place is not None:
            address = (await self._client.ports.addresses(half.topic)).get(place.broker, "")
            if not address:
                raise NotConnected(f"broker {place.broker} does not serve the topic any more")
            stored = requests.viewed(await self._client.ports.ask(address, requests.view(place.log_offset)))
            if stored is not None and stored.properties.get("UNIQ_KEY") == half.half_id:
                return HalfStanding.HIDDEN
        if half.half_id in await self._read(half.topic, [half], is_hidden=True):
            return HalfStanding.HIDDEN
        if place is None or half.decided_at is None:  # another broker may have it, of which nobody told this process
            return HalfStanding.UNPROVEN
        return HalfStanding.UNPROVEN if half.decided_at < await self._oldest(address) else HalfStanding.GONE

    async def _read(self, topic: str, halves: Sequence[HalfRef], *, is_hidden: bool) -> set[str]:
        """Read a topic, or the queue of half messages, from the first of them on; return the ids of those that are there."""
        since = min(half.decided_at or datetime.fromtimestamp(0, UTC) for half in halves) - BEFORE_DECISION
        wanted = {half.half_id for half in halves}
        seen: set[str] = set()
        for name, address in (await self._client.ports.addresses(topic)).items():
            queues = 1 if is_hidden else await self._queues(topic, name)
            async for stored in read_since(self._client.ports, address, HALVES if is_hidden else topic, queues, since):
                half_id = stored.properties.get("UNIQ_KEY", "")
                if half_id in wanted:
                    seen.add(half_id)
                    if is_hidden:
                        self.found[half_id] = Place.of_stored(name, stored)
        return seen

    async def _queues(self, topic: str, broker: str) -> int:
        queues = await self._client.routes.of(topic)
        return 1 + max((queue.proto.id for queue in queues if queue.broker == broker), default=-1)

    async def _brokers_of(self, half: HalfRef) -> dict[str, str] | None:
        """Return the brokers that may have a half message: its own, or all of its topic; None: its own is not there."""
        addresses = await self._client.ports.addresses(half.topic)
        place = Place.read(half.place)
        if place is None:
            return addresses or None
        return {place.broker: addresses[place.broker]} if place.broker in addresses else None

    async def _find(self, address: str, topic: str, half_id: str) -> list[Stored]:
        answer = await self._client.ports.ask(address, requests.query(topic, half_id))
        return [one for one in requests.found(answer, half_id) if one.properties.get("UNIQ_KEY") == half_id]

    async def _oldest(self, address: str) -> datetime:
        """Return since when a broker has kept everything."""
        answer = await self._client.ports.ask(address, Request(requests.GET_RUNTIME_INFO))
        milliseconds = int(json.loads(answer.checked().body)["table"]["earliestMessageTimeStamp"])
        return datetime.fromtimestamp(milliseconds / 1000, UTC) if milliseconds > 0 else EMPTY


def _is_first(half: HalfRef, stored: Stored) -> bool:
    """
    Return whether this is the half message as it was sent: the server stores it again each time it asks about it.

    Only the first one vouches for the index: the message of the half was stored behind it, and before one that was stored again.
    """
    if place := Place.read(half.place):
        return place.log_offset == stored.log_offset
    return half.decided_at is not None and stored.stored_at < half.decided_at + SENT_WITHIN
