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
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial

from outbox.brokers.base import HalfRef, HalfStatus
from outbox.brokers.rocketmq.client import Client
from outbox.brokers.rocketmq.pipelines import pipelined
from outbox.brokers.rocketmq.places import HALVES, Place
from outbox.brokers.rocketmq.reading import MOST_READ, Reader
from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.connection import NotConnected
from outbox.brokers.rocketmq.remoting.frames import RemotingError, Request, Stored
from outbox.logs import get_logger

logger = get_logger(__name__)

# A broker that did not answer, or was frozen, does what waits at its port when it goes on, and indexes it a moment later.
SETTLE_SECONDS = 10.0

# Half messages are stored that long before the decision at most: a lease, and clocks that differ.
BEFORE_DECISION = timedelta(minutes=2)

# So far a broker's clock may be set back between a half message and its message.
CLOCK_STEP = timedelta(seconds=5)

# A half message whose place is not known went first: it was sent that soon behind the decision. Asked about it is later.
SENT_WITHIN = timedelta(seconds=3)

EMPTY = datetime.max.replace(tzinfo=UTC)  # a broker that has no message keeps everything since then

MOST_FOUND = 100_000  # places kept for the ends that follow


class Unanswered:
    """
    Looks half messages up. In the client's loop only, but for `look_up`.

    Args:
        settle_seconds: for which a broker must have answered before a no of its counts.
        most_read: messages that one look-up reads of a topic at most; the next one goes on.
    """

    def __init__(self, client: Client, settle_seconds: float = SETTLE_SECONDS, most_read: int = MOST_READ) -> None:
        self._client = client
        self._settle_seconds = settle_seconds
        self._reader = Reader(client.ports, most_read)
        self.found: dict[str, Place] = {}  # of half messages that were looked up

    def look_up(self, halves: Sequence[HalfRef]) -> list[HalfStatus]:
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
        trouble = None
        for address in (await self._client.ports.addresses(topic)).values():
            try:
                if await self._find(address, topic, half_id):
                    return True
            except (ConnectionError, RemotingError) as error:  # another broker may have it
                trouble = error
        if trouble is not None:
            raise trouble
        return False

    async def _look_up(self, halves: Sequence[HalfRef]) -> list[HalfStatus]:
        if len(self.found) > MOST_FOUND:
            self.found.clear()
        statuses = await pipelined(halves, self._by_id, at_once=self._client.options.in_flight)
        for topic in {half.topic for half, known in zip(halves, statuses, strict=True) if known is None}:
            lost = [half for half, known in zip(halves, statuses, strict=True) if known is None and half.topic == topic]
            read = await self._by_reading(topic, lost)
            statuses = [known or read.get(half.half_id) for half, known in zip(halves, statuses, strict=True)]
        return [known or HalfStatus.UNKNOWN for known in statuses]

    async def _by_id(self, half: HalfRef) -> HalfStatus | None:
        """Return where a half message stands as the index has it; None: the index does not have it."""
        try:
            brokers = await self._brokers_of(half)
            if brokers is None:
                return HalfStatus.UNKNOWN
            is_settled = True
            for address in brokers.values():
                if await self._find(address, half.topic, half.half_id):
                    return HalfStatus.VISIBLE
                is_settled = is_settled and self._client.ports.answering_for(address) >= self._settle_seconds
            if not is_settled:
                return HalfStatus.UNKNOWN
            for name, address in brokers.items():
                for stored in await self._find(address, HALVES, half.half_id):
                    self.found[half.half_id] = Place.of_stored(name, stored)
                    if _is_first(half, stored):
                        return HalfStatus.HIDDEN
        except Exception as error:  # whatever it is, it says nothing of the others
            logger.warning("Half message %s of topic %s cannot be looked up: %r", half.half_id, half.topic, error)
            return HalfStatus.UNKNOWN
        return None

    async def _by_reading(self, topic: str, halves: Sequence[HalfRef]) -> dict[str, HalfStatus]:
        """Return where half messages stand that the index does not have, all of one topic; what is left out is not known."""
        try:
            hidden, unread = await self._hidden(topic, halves)
            halves = [half for half in halves if half.half_id not in unread]
            found: dict[str, HalfStatus] = {}
            read: dict[str, int] = dict.fromkeys((half.half_id for half in halves), 0)
            addresses = await self._client.ports.addresses(topic)
            for name, address in addresses.items():
                there = {half.half_id: _since(half, hidden) for half in halves if _may_be_at(name, half, hidden)}
                if not there:
                    continue
                queues = await self._queues(topic, name)
                known, visible = await self._reader.read(address, topic, queues, there, min(there.values()))
                found |= {half_id: HalfStatus.VISIBLE for half_id in visible if half_id in there}
                for half_id in known & there.keys():
                    read[half_id] += 1
            for half in halves:
                needed = 1 if half.half_id in hidden or half.place else len(addresses)
                if half.half_id not in found and read[half.half_id] >= needed > 0:
                    is_there = half.half_id in hidden
                    found[half.half_id] = HalfStatus.HIDDEN if is_there else await self._what_is_proved(half, addresses)
        except Exception as error:  # it comes again with the next look
            logger.warning("Topic %s cannot be read for half messages that were not ended: %r", topic, error)
            return {}
        return found

    async def _hidden(self, topic: str, halves: Sequence[HalfRef]) -> tuple[dict[str, tuple[str, datetime]], set[str]]:
        """
        Return the half messages that lie at their places, or in the queue of half messages: their broker, and since when.

        And return those for which that queue is not read to its end yet.
        """
        unread: set[str] = set()
        addresses = await self._client.ports.addresses(topic)
        viewed = await pipelined(halves, partial(self._view, addresses), at_once=self._client.options.in_flight)
        hidden = {half.half_id: one for half, one in zip(halves, viewed, strict=True) if one is not None}
        for name, address in addresses.items():
            missing = [half for half in halves if half.half_id not in hidden and _may_be_at(name, half, hidden)]
            if missing:
                since = min(_since(half, hidden) for half in missing)
                wanted = [half.half_id for half in missing]
                known, found = await self._reader.read(address, HALVES, 1, wanted, since)
                unread.update(set(wanted) - known)
                for half_id, stored in found.items():
                    self.found[half_id] = Place.of_stored(name, stored)
                    hidden[half_id] = name, stored.stored_at
        return hidden, unread - hidden.keys()

    async def _view(self, addresses: Mapping[str, str], half: HalfRef) -> tuple[str, datetime] | None:
        """Look at a half message's place; return its broker and since when it lies there, None where it does not."""
        place = Place.read(half.place)
        if place is None:
            return None
        if place.broker not in addresses:
            raise NotConnected(f"broker {place.broker} does not serve the topic any more")
        stored = await self._client.ports.view(addresses[place.broker], place.log_offset, half.half_id)
        return None if stored is None else (place.broker, stored.stored_at)

    async def _what_is_proved(self, half: HalfRef, addresses: Mapping[str, str]) -> HalfStatus:
        """Return what it proves that neither half message nor message is there."""
        place = Place.read(half.place)
        if place is None or half.decided_at is None:  # another broker may have it, of which nobody told this process
            return HalfStatus.UNPROVEN
        oldest = await self._oldest(addresses[place.broker])
        return HalfStatus.UNPROVEN if half.decided_at < oldest else HalfStatus.GONE

    async def _queues(self, topic: str, broker: str) -> int:
        """Return how many queues a broker has of a topic. Raises NotConnected where the route has none yet."""
        queues = [queue.proto.id for queue in await self._client.routes.of(topic) if queue.broker == broker]
        if not queues:
            raise NotConnected(f"no route of topic {topic} has broker {broker}")
        return 1 + int(max(queues))

    async def _brokers_of(self, half: HalfRef) -> dict[str, str] | None:
        """Return the brokers that may have a half message: its own, or all of its topic; None: its own is not there."""
        addresses = await self._client.ports.addresses(half.topic)
        place = Place.read(half.place)
        if place is None:
            return addresses or None
        return {place.broker: addresses[place.broker]} if place.broker in addresses else None

    async def _find(self, address: str, topic: str, half_id: str) -> list[Stored]:
        return [
            one for one in await self._client.ports.find(address, topic, half_id) if one.properties.get("UNIQ_KEY") == half_id
        ]

    async def _oldest(self, address: str) -> datetime:
        """Return since when a broker has kept everything."""
        answer = await self._client.ports.ask(address, Request(requests.GET_RUNTIME_INFO))
        milliseconds = int(json.loads(answer.checked().body)["table"]["earliestMessageTimeStamp"])
        return datetime.fromtimestamp(milliseconds / 1000, UTC) if milliseconds > 0 else EMPTY


def _may_be_at(broker: str, half: HalfRef, hidden: Mapping[str, tuple[str, datetime]]) -> bool:
    """Return whether a broker may have a half message and its message: where its broker is known, only that one."""
    place = Place.read(half.place)
    known = hidden[half.half_id][0] if half.half_id in hidden else place.broker if place else broker
    return known == broker


def _since(half: HalfRef, hidden: Mapping[str, tuple[str, datetime]]) -> datetime:
    """Return since when the message of a half message may be there: by the broker's own clock where the half message is."""
    if half.half_id in hidden:
        return hidden[half.half_id][1] - CLOCK_STEP
    return (half.decided_at or datetime.fromtimestamp(0, UTC) + BEFORE_DECISION) - BEFORE_DECISION


def _is_first(half: HalfRef, stored: Stored) -> bool:
    """
    Return whether this is the half message as it was sent: the server stores it again each time it asks about it.

    Only the first one vouches for the index: the message of the half was stored behind it, and before one that was stored again.
    """
    if place := Place.read(half.place):
        return place.log_offset == stored.log_offset
    return half.decided_at is not None and stored.stored_at < half.decided_at + SENT_WITHIN
