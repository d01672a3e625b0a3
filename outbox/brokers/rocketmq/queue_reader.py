"""
Searches the queues of a topic on a broker for messages, without using a consumer group's offset.

A topic may have more messages than one call should read. So a scan stops at the offsets at which the queues ended when the scan
began. If it does not reach them in one call, the next call for the same topic continues it.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.client import RemotingClient
from outbox.brokers.rocketmq.remoting.frames import StoredMessage

MAX_READ = 50_000  # the maximum number of messages that one call reads, which takes about a second


Offsets = dict[int, tuple[int, int]]  # queue -> the next offset to read, and the end of the queue when the scan began


class QueueReader:
    """Searches topics, in several calls if necessary. Use it only in one event loop."""

    def __init__(self, remoting: RemotingClient, max_messages: int) -> None:
        self._remoting = remoting
        self._max_messages = max_messages
        # Broker and topic of an unfinished scan -> the half ids that it searches for, its offsets, and half id -> message found.
        self._scans: dict[tuple[str, str], tuple[frozenset[str], Offsets, dict[str, StoredMessage]]] = {}

    async def read(
        self, address: str, topic: str, queues: int, wanted: Collection[str], since: datetime
    ) -> tuple[frozenset[str], dict[str, StoredMessage]]:
        """
        Search the messages that a broker has stored in a topic since a time for those with given half ids.

        Args:
            queues: the number of the topic's queues on the broker.
            wanted: the half ids; ignored if the call continues an earlier scan.

        Returns:
            The half ids that were searched for, and half id -> message for those that were found. Both are empty if the scan has
            not reached the end.

        Raises:
            NotConnected, NoAnswer, RemotingError: the broker cannot be read.
        """
        key = address, topic
        if key not in self._scans:
            self._scans[key] = frozenset(wanted), await self._read_offsets(address, topic, queues, since), {}
        (searched, offsets, found), remaining = self._scans[key], self._max_messages
        for queue, (offset, end) in list(offsets.items()):
            while offset < end and remaining > 0:
                stored, next_offset = requests.pulled(await self._remoting.ask(address, requests.pull(topic, queue, offset)))
                for message in stored:
                    if (half_id := message.properties.get("UNIQ_KEY", "")) in searched:
                        found.setdefault(half_id, message)
                remaining -= max(1, len(stored))
                offset = next_offset if next_offset > offset else end
                offsets[queue] = offset, end
        if any(offset < end for offset, end in offsets.values()):
            return frozenset(), {}
        del self._scans[key]
        return searched, found

    async def _read_offsets(self, address: str, topic: str, queues: int, since: datetime) -> Offsets:
        milliseconds = max(0, int(since.timestamp() * 1000))
        offsets = {}
        for queue in range(queues):
            first = await self._remoting.ask(address, requests.offset_at(topic, queue, milliseconds))
            last = await self._remoting.ask(address, requests.end_of(topic, queue))
            offsets[queue] = int(first.checked().fields["offset"]), int(last.checked().fields["offset"])
        return offsets
