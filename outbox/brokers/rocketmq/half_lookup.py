"""
Looks up the status of half messages whose end (commit or rollback) was not answered.

First, the brokers' indexes are searched for the message, by the id of its half message. If one of them has the message, the
message is visible. If none has it, this proves something only if an index has the half message itself: after a crash, a broker
rebuilds its newest index from one file of its log, so the index lacks older messages. Otherwise, the half message is read at its
place in the log, where it must have the expected id, since a broker that was restored from a backup may have another message
there. Then the topic is read from the time of the half message on.

Source: docs/explanation/half-messages.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial

from outbox.brokers.base import HalfRef, HalfStatus
from outbox.brokers.rocketmq.client import RocketMQClient
from outbox.brokers.rocketmq.places import HALVES, HalfPlace
from outbox.brokers.rocketmq.queue_reader import MAX_READ, QueueReader
from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.connection import NotConnected
from outbox.brokers.rocketmq.remoting.frames import RemotingError, Request, StoredMessage
from outbox.logs import error_text, get_logger

logger = get_logger(__name__)

# A broker that resumes after a freeze carries out the requests that wait at its port, and indexes their messages a moment later.
# So its "not found" counts only after the broker has answered every request for this time.
SETTLE_SECONDS = 10.0

# A half message was stored at most this time before its commit was decided: one lease, and a difference between the clocks.
BEFORE_DECISION = timedelta(minutes=2)

# How far a broker's clock may be set back between the times at which it stores a half message and the message.
CLOCK_STEP = timedelta(seconds=5)

# A half message whose place is unknown was sent half first, and was stored at most this time after its `decided_at`. The server
# stores a copy of the half message for each check-back; these copies are stored later.
SENT_WITHIN = timedelta(seconds=3)

MAX_PLACES = 100_000  # the places that a look-up found are kept for the commits that follow, up to this number


class HalfLookup:
    """
    Looks half messages up. All methods except `look_up` must be called in the client's event loop.

    Args:
        settle_seconds: a broker's "not found" counts only after it has answered all requests for this time.
        max_read: the maximum number of messages of a topic that one look-up reads; the next one continues.
    """

    def __init__(self, client: RocketMQClient, settle_seconds: float = SETTLE_SECONDS, max_read: int = MAX_READ) -> None:
        self._client = client
        self._settle_seconds = settle_seconds
        self._reader = QueueReader(client.remoting, max_read)
        self.places: dict[str, HalfPlace] = {}  # half id -> the place that a look-up found

    def look_up(self, halves: Sequence[HalfRef]) -> list[HalfStatus]:
        """Return the status of each half message; UNKNOWN if it cannot be looked up."""
        return self._client.run(self._look_up(halves))

    async def place_of(self, half: HalfRef) -> HalfPlace | None:
        """
        Return the place of a half message that an earlier look-up found, or that the brokers find by the id now. None: not found.

        Raises:
            ConnectionError, RemotingError: a broker cannot be asked.
        """
        known = self.places.pop(half.half_id, None)
        if known is not None:
            return known
        for name, address in (await self._client.remoting.addresses(half.topic)).items():
            for stored in await self._find(address, HALVES, half.half_id):
                return HalfPlace.of_stored(name, stored)
        return None

    async def is_visible(self, topic: str, half_id: str) -> bool:
        """Return whether the index has the message of a half message. Raises ConnectionError, RemotingError."""
        trouble = None
        for address in (await self._client.remoting.addresses(topic)).values():
            try:
                if await self._find(address, topic, half_id):
                    return True
            except (ConnectionError, RemotingError) as error:  # another broker may have it
                trouble = error
        if trouble is not None:
            raise trouble
        return False

    async def _look_up(self, halves: Sequence[HalfRef]) -> list[HalfStatus]:
        if len(self.places) > MAX_PLACES:
            self.places.clear()
        statuses = await self._client.pipelined(halves, self._look_up_in_index)
        for topic in {half.topic for half, status in zip(halves, statuses, strict=True) if status is None}:
            unproven = [half for half, status in zip(halves, statuses, strict=True) if status is None and half.topic == topic]
            in_queues = await self._look_up_in_queues(topic, unproven)
            statuses = [status or in_queues.get(half.half_id) for half, status in zip(halves, statuses, strict=True)]
        return [status or HalfStatus.UNKNOWN for status in statuses]

    async def _look_up_in_index(self, half: HalfRef) -> HalfStatus | None:
        """Return the status of a half message by the brokers' indexes. None: the indexes prove nothing."""
        try:
            brokers = await self._brokers_of(half)
            if brokers is None:
                return HalfStatus.UNKNOWN
            is_settled = True
            for address in brokers.values():
                if await self._find(address, half.topic, half.half_id):
                    return HalfStatus.VISIBLE
                is_settled = is_settled and self._client.remoting.answering_for(address) >= self._settle_seconds
            if not is_settled:
                return HalfStatus.UNKNOWN
            for name, address in brokers.items():
                for stored in await self._find(address, HALVES, half.half_id):
                    self.places[half.half_id] = HalfPlace.of_stored(name, stored)
                    if _is_original(half, stored):
                        return HalfStatus.HIDDEN
        except Exception as error:  # does not affect the look-up of other half messages
            logger.warning("Half message %s of topic %s cannot be looked up: %s", half.half_id, half.topic, error_text(error))
            return HalfStatus.UNKNOWN
        return None

    async def _look_up_in_queues(self, topic: str, halves: Sequence[HalfRef]) -> dict[str, HalfStatus]:
        """Return half id -> status for half messages about which the indexes prove nothing. Those left out are UNKNOWN."""
        try:
            hidden, unread = await self._find_hidden(topic, halves)
            halves = [half for half in halves if half.half_id not in unread]
            half_statuses: dict[str, HalfStatus] = {}
            # Half id -> how many of the brokers that may have its message were read to the end.
            brokers_read: dict[str, int] = dict.fromkeys((half.half_id for half in halves), 0)
            addresses = await self._client.remoting.addresses(topic)
            for name, address in addresses.items():
                read_from = {half.half_id: _since(half, hidden) for half in halves if _may_be_on(name, half, hidden)}
                if not read_from:
                    continue
                queues = await self._queues(topic, name)
                searched, visible = await self._reader.read(address, topic, queues, read_from, min(read_from.values()))
                half_statuses |= {half_id: HalfStatus.VISIBLE for half_id in visible if half_id in read_from}
                for half_id in searched & read_from.keys():
                    brokers_read[half_id] += 1
            for half in halves:
                needed = 1 if half.half_id in hidden or half.place else len(addresses)
                if half.half_id not in half_statuses and brokers_read[half.half_id] >= needed > 0:
                    is_hidden = half.half_id in hidden
                    half_statuses[half.half_id] = (
                        HalfStatus.HIDDEN if is_hidden else await self._status_if_absent(half, addresses)
                    )
        except Exception as error:  # the next look-up tries again
            logger.warning("Topic %s cannot be read to look up half messages; retrying later: %s", topic, error_text(error))
            return {}
        return half_statuses

    async def _find_hidden(self, topic: str, halves: Sequence[HalfRef]) -> tuple[dict[str, tuple[str, datetime]], set[str]]:
        """
        Search for half messages at their places, and then in the brokers' queues of half messages.

        Returns:
            Half id -> broker and time of storage, for each half message that was found; and the ids of the others for which a
            broker's queue has not been read to its end.
        """
        unread: set[str] = set()
        addresses = await self._client.remoting.addresses(topic)
        at_places = await self._client.pipelined(halves, partial(self._read_at_place, addresses))
        hidden = {half.half_id: stored for half, stored in zip(halves, at_places, strict=True) if stored is not None}
        for name, address in addresses.items():
            missing = [half for half in halves if half.half_id not in hidden and _may_be_on(name, half, hidden)]
            if missing:
                since = min(_since(half, hidden) for half in missing)
                wanted = [half.half_id for half in missing]
                searched, in_queue = await self._reader.read(address, HALVES, 1, wanted, since)
                unread.update(set(wanted) - searched)
                for half_id, message in in_queue.items():
                    self.places[half_id] = HalfPlace.of_stored(name, message)
                    hidden[half_id] = name, message.stored_at
        return hidden, unread - hidden.keys()

    async def _read_at_place(self, addresses: Mapping[str, str], half: HalfRef) -> tuple[str, datetime] | None:
        """Return the broker and time of storage of a half message that is at its place. None: it is not there."""
        place = HalfPlace.read(half.place)
        if place is None:
            return None
        if place.broker not in addresses:
            raise NotConnected(f"broker {place.broker} no longer serves the topic")
        stored = await self._client.remoting.view(addresses[place.broker], place.log_offset, half.half_id)
        return None if stored is None else (place.broker, stored.stored_at)

    async def _status_if_absent(self, half: HalfRef, addresses: Mapping[str, str]) -> HalfStatus:
        """Return the status of a half message if neither it nor its message is found."""
        place = HalfPlace.read(half.place)
        if place is None or half.decided_at is None:  # a broker that this process does not know may have it
            return HalfStatus.UNPROVEN
        answer = await self._client.remoting.ask(addresses[place.broker], Request(requests.GET_RUNTIME_INFO))
        oldest = int(json.loads(answer.checked().body)["table"]["earliestMessageTimeStamp"]) / 1000  # 0: the broker has none
        return HalfStatus.GONE if 0 < oldest <= half.decided_at.timestamp() else HalfStatus.UNPROVEN

    async def _queues(self, topic: str, broker: str) -> int:
        """Return the number of a topic's queues on a broker. Raises NotConnected if the route has none."""
        queues = [queue.proto.id for queue in await self._client.routes.of(topic) if queue.broker == broker]
        if not queues:
            raise NotConnected(f"no route of topic {topic} has broker {broker}")
        return 1 + int(max(queues))

    async def _brokers_of(self, half: HalfRef) -> dict[str, str] | None:
        """
        Return the brokers that may have a half message: that of its place or, if the place is unknown, all of its topic.

        None: the broker of its place, or every broker, is missing from the topic's route.
        """
        addresses = await self._client.remoting.addresses(half.topic)
        place = HalfPlace.read(half.place)
        if place is None:
            return addresses or None
        return {place.broker: addresses[place.broker]} if place.broker in addresses else None

    async def _find(self, address: str, topic: str, half_id: str) -> list[StoredMessage]:
        return [
            message
            for message in await self._client.remoting.find(address, topic, half_id)
            if message.properties.get("UNIQ_KEY") == half_id
        ]


def _may_be_on(broker: str, half: HalfRef, hidden: Mapping[str, tuple[str, datetime]]) -> bool:
    """Return whether a broker may have a half message and its message. True for each broker if nothing tells which one has it."""
    place = HalfPlace.read(half.place)
    holder = hidden[half.half_id][0] if half.half_id in hidden else place.broker if place else broker
    return holder == broker


def _since(half: HalfRef, hidden: Mapping[str, tuple[str, datetime]]) -> datetime:
    """Return the earliest time at which the message of a half message may have been stored."""
    if half.half_id in hidden:
        return hidden[half.half_id][1] - CLOCK_STEP
    return (half.decided_at or datetime.fromtimestamp(0, UTC) + BEFORE_DECISION) - BEFORE_DECISION


def _is_original(half: HalfRef, stored: StoredMessage) -> bool:
    """
    Return whether this is the half message as it was sent, and not one of the copies that the server stores, one per check-back.

    Only the original proves that the index covers the message: the message is stored after the original, but maybe before a copy.
    """
    if place := HalfPlace.read(half.place):
        return place.log_offset == stored.log_offset
    return half.decided_at is not None and stored.stored_at < half.decided_at + SENT_WITHIN
