"""
Reads the queues of a topic at a broker's own port, without a consumer group's offset.

A topic may have more messages than one call should read. So a scan ends where the queues ended when it began, and if that is
too far for one call, the next call for the same topic continues it.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.client import RemotingClient
from outbox.brokers.rocketmq.remoting.frames import StoredMessage

MAX_READ = 50_000  # messages in one call: about a second


Offsets = dict[int, tuple[int, int]]  # queue -> the next offset to read, and the end of the queue when the scan began


class QueueReader:
    """Reads topics, in several calls if necessary. In the thread of one loop only."""

    def __init__(self, remoting: RemotingClient, max_messages: int) -> None:
        self._remoting = remoting
        self._max_messages = max_messages
        # Broker, topic -> the ids of half messages that a scan searches for, how far it is, and the messages that have them.
        self._scans: dict[tuple[str, str], tuple[frozenset[str], Offsets, dict[str, StoredMessage]]] = {}

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
            self._scans[key] = frozenset(wanted), await self._begin(address, topic, queues, since), {}
        (searched, offsets, there), left = self._scans[key], self._max_messages
        for queue, (offset, end) in list(offsets.items()):
            while offset < end and left > 0:
                stored, next_offset = requests.pulled(await self._remoting.ask(address, requests.pull(topic, queue, offset)))
                for message in stored:
                    if (half_id := message.properties.get("UNIQ_KEY", "")) in searched:
                        there.setdefault(half_id, message)
                left -= max(1, len(stored))
                offset = next_offset if next_offset > offset else end
                offsets[queue] = offset, end
        if any(offset < end for offset, end in offsets.values()):
            return frozenset(), {}
        del self._scans[key]
        return searched, there

    async def _begin(self, address: str, topic: str, queues: int, since: datetime) -> Offsets:
        milliseconds = max(0, int(since.timestamp() * 1000))
        messages = {}
        for queue in range(queues):
            first = await self._remoting.ask(address, requests.offset_at(topic, queue, milliseconds))
            last = await self._remoting.ask(address, requests.end_of(topic, queue))
            messages[queue] = int(first.checked().fields["offset"]), int(last.checked().fields["offset"])
        return messages
