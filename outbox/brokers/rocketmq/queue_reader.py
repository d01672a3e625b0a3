"""
Reads the queues of a topic at a broker's own port, without a consumer group's offset.

A topic may have more messages than one call should read. So a scan ends where the queues ended when it began, and if that is
too far for one call, the next call for the same topic continues it.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

import msgspec

from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.frames import StoredMessage
from outbox.brokers.rocketmq.remoting.ports import Ports

MAX_READ = 50_000  # messages in one call: about a second


class QueueScan(msgspec.Struct):
    """
    A scan in progress.

    Args:
        wanted: ids of half messages.
        queues: queue -> the next offset to read, and the end of the queue when the scan began.
        found: wanted id -> the message that has it.
    """

    wanted: frozenset[str]
    queues: dict[int, tuple[int, int]]
    found: dict[str, StoredMessage] = msgspec.field(default_factory=dict)


class QueueReader:
    """Reads topics, in several calls if necessary. In the thread of one loop only."""

    def __init__(self, ports: Ports, max_messages: int) -> None:
        self._ports = ports
        self._max_messages = max_messages
        self._scans: dict[tuple[str, str], QueueScan] = {}  # broker, topic

    async def read(
        self, address: str, topic: str, queues: int, wanted: Collection[str], since: datetime
    ) -> tuple[frozenset[str], dict[str, StoredMessage]]:
        """
        Search for half messages, or their messages, in what a broker has stored of a topic since a time.

        Args:
            wanted: their ids; ignored when a scan is continued.

        Returns:
            The ids that were searched for, and those of them that were found. Both are empty if the scan has not reached the end.

        Raises:
            NotConnected, NoAnswer, RemotingError: the broker cannot be read.
        """
        key = address, topic
        if key not in self._scans:
            self._scans[key] = QueueScan(frozenset(wanted), await self._begin(address, topic, queues, since))
        scan, left = self._scans[key], self._max_messages
        for queue, (offset, end) in list(scan.queues.items()):
            while offset < end and left > 0:
                stored, next_offset = requests.pulled(await self._ports.ask(address, requests.pull(topic, queue, offset)))
                for message in stored:
                    if (half_id := message.properties.get("UNIQ_KEY", "")) in scan.wanted:
                        scan.found.setdefault(half_id, message)
                left -= max(1, len(stored))
                offset = next_offset if next_offset > offset else end
                scan.queues[queue] = offset, end
        if any(offset < end for offset, end in scan.queues.values()):
            return frozenset(), {}
        del self._scans[key]
        return scan.wanted, scan.found

    async def _begin(self, address: str, topic: str, queues: int, since: datetime) -> dict[int, tuple[int, int]]:
        milliseconds = max(0, int(since.timestamp() * 1000))
        messages = {}
        for queue in range(queues):
            first = await self._ports.ask(address, requests.offset_at(topic, queue, milliseconds))
            last = await self._ports.ask(address, requests.end_of(topic, queue))
            messages[queue] = int(first.checked().fields["offset"]), int(last.checked().fields["offset"])
        return messages
