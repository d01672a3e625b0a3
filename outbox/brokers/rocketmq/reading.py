"""
Reads the queues of a topic at a broker's own port, moving nobody's offset.

A busy topic may have more than one reading is to take. So a reading goes up to where the queues ended when it began, and where
that is too far, the next call for the same topic goes on.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime

from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.frames import Stored
from outbox.brokers.rocketmq.remoting.ports import Ports

MOST_READ = 50_000  # messages in one call: about a second


@dataclass(slots=True)
class Reading:
    """
    A reading that has begun.

    Args:
        wanted: ids of half messages.
        queues: queue -> where it goes on, and where the queue ended when this began.
        found: wanted id -> what has it.
    """

    wanted: frozenset[str]
    queues: dict[int, tuple[int, int]]
    found: dict[str, Stored] = field(default_factory=dict)


class Reader:
    """Reads topics, some of each at a call. In the thread of one loop only."""

    def __init__(self, ports: Ports, most: int) -> None:
        self._ports = ports
        self._most = most
        self._readings: dict[tuple[str, str], Reading] = {}  # broker, topic

    async def read(
        self, address: str, topic: str, queues: int, wanted: Collection[str], since: datetime
    ) -> tuple[frozenset[str], dict[str, Stored]]:
        """
        Look for half messages, or the messages of such, among what a broker has of a topic since a time.

        Args:
            wanted: their ids. Where a reading goes on, those that it began with count.

        Returns:
            The ids that were looked for up to the end, none where the reading is to go on; and those of them that are there.

        Raises:
            NotConnected, NoAnswer, RemotingError: the broker cannot be read.
        """
        key = address, topic
        if key not in self._readings:
            self._readings[key] = Reading(frozenset(wanted), await self._begin(address, topic, queues, since))
        reading, left = self._readings[key], self._most
        for queue, (offset, end) in list(reading.queues.items()):
            while offset < end and left > 0:
                stored, behind = requests.pulled(await self._ports.ask(address, requests.pull(topic, queue, offset)))
                for one in stored:
                    if (half_id := one.properties.get("UNIQ_KEY", "")) in reading.wanted:
                        reading.found.setdefault(half_id, one)
                left -= max(1, len(stored))
                offset = behind if behind > offset else end
                reading.queues[queue] = offset, end
        if any(offset < end for offset, end in reading.queues.values()):
            return frozenset(), {}
        del self._readings[key]
        return reading.wanted, reading.found

    async def _begin(self, address: str, topic: str, queues: int, since: datetime) -> dict[int, tuple[int, int]]:
        milliseconds = max(0, int(since.timestamp() * 1000))
        found = {}
        for queue in range(queues):
            first = await self._ports.ask(address, requests.offset_at(topic, queue, milliseconds))
            last = await self._ports.ask(address, requests.end_of(topic, queue))
            found[queue] = int(first.checked().fields["offset"]), int(last.checked().fields["offset"])
        return found
