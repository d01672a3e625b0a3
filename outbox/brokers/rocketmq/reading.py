"""Reads the queues of a topic at a broker's own port, moving nobody's offset."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime

from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.frames import Stored
from outbox.brokers.rocketmq.remoting.ports import Ports

MOST_READ = 200_000  # messages in one reading of a topic at one broker: about 5 s


class TooMuch(Exception):
    """Raised when a reading would take too long."""


async def read_since(ports: Ports, address: str, topic: str, queues: int, since: datetime) -> AsyncIterator[Stored]:
    """
    Give the messages that a broker has of a topic and has stored since a time.

    Raises:
        NotConnected, NoAnswer, RemotingError: the broker cannot be read.
        TooMuch: there are more than MOST_READ.
    """
    left = MOST_READ
    since_ms = max(0, int(since.timestamp() * 1000))
    for queue in range(queues):
        answer = await ports.ask(address, requests.offset_at(topic, queue, since_ms))
        offset = int(answer.checked().fields["offset"])
        while left > 0:
            found, behind = requests.pulled(await ports.ask(address, requests.pull(topic, queue, offset)))
            for stored in found:
                yield stored
            left -= len(found)
            if behind <= offset:
                break
            offset = behind
    if left <= 0:
        raise TooMuch(f"more than {MOST_READ} messages were stored there since {since}")
