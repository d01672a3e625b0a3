"""
Dead letters of groups, read at the brokers' own ports. A replay is for one group only.

RocketMQ keeps the dead letters of a group in a topic, `%DLQ%<group>`, as long as its log (`fileReservedTime`). They are read
without an offset, so a dead letter is listed until an operator acts. Nothing can be deleted from the log, so messages are added:
- a replay adds a copy on the original topic, addressed to the group; this package ignores it in other groups;
- a mark in the dead letter topic says that a dead letter was replayed or discarded.
Copy and mark have the dead letter's id among their keys. The copy is sent first: after a crash in between, the dead letter is
still listed, and the next replay finds the copy and sends none.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from outbox.brokers.base import BrokerDeadLetter
from outbox.brokers.rocketmq.brokers import addresses_of_all
from outbox.brokers.rocketmq.client import RocketMQClient
from outbox.brokers.rocketmq.codec import REPLAY_GROUP, SERVER_PROPERTY, message_id_of, source_of
from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.frames import RemotingError, Request, StoredMessage
from outbox.brokers.rocketmq.remoting.requests import ANY_QUEUE, NO_SUCH_TOPIC
from outbox.errors import BrokerUnavailable

DEAD_LETTER_PREFIX, RETRY_PREFIX = "%DLQ%", "%RETRY%"

MARK = "outbox-settled"  # property of a mark: replayed or discarded

# The server's properties that a copy keeps, so that it is found, filtered and ordered like the original.
KEPT = {"KEYS", "TAGS", "UNIQ_KEY", "__SHARDINGKEY"}

INDEX_SECONDS = 5.0  # wait at most this long for the index, which is updated a moment after a message is stored


@dataclass(frozen=True, slots=True)
class StoredDeadLetter:
    """A dead letter in a broker's log. `topic`: its original topic; `broker`: host:port."""

    broker: str
    topic: str
    stored: StoredMessage


async def dead_letters(client: RocketMQClient, group: str, server_groups: Collection[str], limit: int) -> list[BrokerDeadLetter]:
    """Return the dead letters of a group that were neither replayed nor discarded, oldest first."""
    with _broker_errors():
        return [_as_dead_letter(letter, group) for letter in (await _open_dead_letters(client, server_groups))[:limit]]


async def count_dead_letters(client: RocketMQClient, server_groups: Collection[str]) -> dict[str, int]:
    """
    Return the number of dead letters that were neither replayed nor discarded, by topic.

    They are read, since offsets count the marks, too, and letters of all topics. Where there are none, that is one request.
    """
    with _broker_errors():
        return dict(Counter(letter.topic for letter in await _open_dead_letters(client, server_groups)))


async def replay(client: RocketMQClient, group: str, server_groups: Collection[str], ids: Collection[str]) -> set[str]:
    """Send one copy of each dead letter to its group. Return the ids of those that were copied now."""
    settled = set()
    with _broker_errors():
        letters = await _unsettled(client, server_groups, ids)
        for letter in letters:
            if not await client.ports.find(letter.broker, letter.topic, letter.stored.id):
                await _send_copy(client, letter, group)
                settled.add(letter.stored.id)
            await _send_mark(client, letter, "replayed")
        await _wait_until_indexed(client, letters)
    return settled


async def discard(client: RocketMQClient, server_groups: Collection[str], ids: Collection[str]) -> set[str]:
    """Mark dead letters as discarded. Return their ids."""
    with _broker_errors():
        letters = await _unsettled(client, server_groups, ids)
        for letter in letters:
            await _send_mark(client, letter, "discarded")
        await _wait_until_indexed(client, letters)
    return {letter.stored.id for letter in letters}


async def dead_lettered_topics(client: RocketMQClient, broker: str, message_id: str) -> list[str]:
    """Return the topics in which a message is a dead letter of some group. Raises as `Ports.ask`."""
    answer = await client.ports.ask(broker, Request(requests.GET_ALL_TOPICS))
    topics = json.loads(answer.checked().body)["topicConfigTable"]
    groups = [name.removeprefix(DEAD_LETTER_PREFIX) for name in topics if name.startswith(DEAD_LETTER_PREFIX)]
    found = [
        _dead_letter(broker, group, stored)
        for group in groups
        for stored in await client.ports.find(broker, DEAD_LETTER_PREFIX + group, message_id)
    ]
    return [letter.topic for letter in found if not await _is_settled(client, letter)]


async def _open_dead_letters(client: RocketMQClient, server_groups: Collection[str]) -> list[StoredDeadLetter]:
    """Return the dead letters that have no mark, oldest first."""
    found: dict[str, StoredDeadLetter] = {}
    for letter in await _stored_dead_letters(client, server_groups):
        if MARK in letter.stored.properties:
            found.pop(letter.stored.properties["KEYS"], None)
        else:
            found[letter.stored.id] = letter
    return list(found.values())


def _as_dead_letter(letter: StoredDeadLetter, group: str) -> BrokerDeadLetter:
    stored = letter.stored
    delivery_count = max(1, stored.retries)
    message_id, source = message_id_of(stored.properties), source_of(stored.properties)
    return BrokerDeadLetter(stored.id, group, letter.topic, message_id, "", delivery_count, stored.stored_at, source)


async def _stored_dead_letters(client: RocketMQClient, server_groups: Collection[str]) -> list[StoredDeadLetter]:
    """Return the dead letters and marks on all brokers, oldest first."""
    brokers = await addresses_of_all(client)
    queues = [await _read(client, broker, group) for broker in brokers for group in server_groups]
    return list(heapq.merge(*queues, key=lambda letter: letter.stored.stored_at))


async def _read(client: RocketMQClient, broker: str, server_group: str) -> list[StoredDeadLetter]:
    letters: list[StoredDeadLetter] = []
    offset, has_more = 0, True
    while has_more:
        answer = await client.ports.ask(broker, requests.pull(DEAD_LETTER_PREFIX + server_group, 0, offset))
        if answer.code == NO_SUCH_TOPIC:  # the group has never had a dead letter
            return letters
        found, next_offset = requests.pulled(answer)
        letters += (_dead_letter(broker, server_group, stored) for stored in found)
        has_more, offset = next_offset > offset, next_offset
    return letters


def _dead_letter(broker: str, server_group: str, stored: StoredMessage) -> StoredDeadLetter:
    """Return a dead letter with its original topic. RETRY_TOPIC may name the group's retry topic, `%RETRY%<group>_<topic>`."""
    topic = stored.properties.get("RETRY_TOPIC", stored.topic)
    if topic.startswith(RETRY_PREFIX + server_group):
        topic = topic[len(RETRY_PREFIX + server_group) + 1 :]
    return StoredDeadLetter(broker, topic, stored)


async def _unsettled(client: RocketMQClient, server_groups: Collection[str], ids: Collection[str]) -> list[StoredDeadLetter]:
    """Return dead letters by their ids, except those that were replayed or discarded."""
    brokers = await addresses_of_all(client)
    found = [
        _dead_letter(broker, group, stored)
        for one in sorted(set(ids))
        for broker in brokers
        for stored in await _view(client, broker, one)
        for group in server_groups
        if stored.topic == DEAD_LETTER_PREFIX + group
    ]
    return [letter for letter in found if not await _is_settled(client, letter)]


async def _view(client: RocketMQClient, broker: str, letter_id: str) -> list[StoredMessage]:
    """Return the message with this id from a broker's log, if it is there. Another broker has other data at its offset."""
    try:
        place = int(letter_id[-16:], 16)
    except ValueError:
        return []
    found = requests.viewed(await client.ports.ask(broker, requests.view(place)))
    return [found] if found is not None and found.id == letter_id else []


async def _is_settled(client: RocketMQClient, letter: StoredDeadLetter) -> bool:
    """Return whether a mark says that a dead letter was replayed or discarded."""
    return bool(await client.ports.find(letter.broker, letter.stored.topic, letter.stored.id))


async def _send_copy(client: RocketMQClient, letter: StoredDeadLetter, group: str) -> None:
    """Send a copy to the queue that holds the messages of its key."""
    stored = letter.stored
    properties = {name: text for name, text in stored.properties.items() if name in KEPT or not SERVER_PROPERTY.match(name)}
    properties["KEYS"] = f"{properties.get('KEYS', '')} {stored.id}".strip()
    properties[REPLAY_GROUP] = group
    first = await client.ports.find(letter.broker, letter.topic, message_id_of(stored.properties))
    queue = first[0].queue if first else ANY_QUEUE
    request = requests.send_copy(letter.topic, queue, stored, properties)
    (await client.ports.ask(letter.broker, request)).checked()


async def _send_mark(client: RocketMQClient, letter: StoredDeadLetter, what: str) -> None:
    stored = replace(letter.stored, body=what.encode(), flag=0)
    request = requests.send_copy(stored.topic, ANY_QUEUE, stored, {"KEYS": stored.id, MARK: what})
    (await client.ports.ask(letter.broker, request)).checked()


async def _wait_until_indexed(client: RocketMQClient, letters: Sequence[StoredDeadLetter]) -> None:
    """Wait until the marks are in the index, so that no second replay follows."""
    deadline = time.monotonic() + INDEX_SECONDS
    waiting = list(letters)
    while waiting and time.monotonic() < deadline:
        waiting = [letter for letter in waiting if not await _is_settled(client, letter)]
        await asyncio.sleep(0.01)


@contextmanager
def _broker_errors() -> Iterator[None]:
    try:
        yield
    except (RemotingError, ConnectionError) as error:
        raise BrokerUnavailable(f"RocketMQ's dead letters cannot be read or sent: {error}") from error
