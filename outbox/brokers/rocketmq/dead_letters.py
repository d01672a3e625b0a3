"""
Dead letters of groups, read at the brokers' own ports, and sent again for the one group that an operator names.

RocketMQ keeps dead letters in a topic for each group, `%DLQ%<group>`, as long as its log (`fileReservedTime`). Reading them
moves no offset: a letter stays until an operator acts. Nothing can be taken out of the log; so acting is adding to it:
- a replay is a copy on the topic that the letter came from, addressed to its group: the adapter passes it over in others;
- a mark among the dead letters says that one was replayed or discarded.
Copy and mark have the letter's id among their keys. The copy comes first: whoever dies before the mark leaves a letter that
is still listed, and is not sent twice.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from outbox.brokers.base import DeadLetter
from outbox.brokers.rocketmq.brokers import addresses_of_all
from outbox.brokers.rocketmq.client import Client
from outbox.brokers.rocketmq.envelope import ADDRESSEE, THEIRS, message_id_of
from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.frames import RemotingError, Request, Stored
from outbox.brokers.rocketmq.remoting.requests import ANY_QUEUE, NO_SUCH_TOPIC
from outbox.errors import BrokerUnavailable

LETTERS, RETRIES = "%DLQ%", "%RETRY%"

MARK = "outbox-settled"  # property of a mark: replayed or discarded

# Of the properties that are the server's, what a copy keeps: it is found, filtered and ordered as the first one was.
KEPT = {"KEYS", "TAGS", "UNIQ_KEY", "__SHARDINGKEY"}

INDEX_SECONDS = 5.0  # a message is found by its keys a moment after it was stored


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter where it lies. `topic`: where it was read; `broker`: host:port."""

    broker: str
    topic: str
    stored: Stored


async def dead_letters(client: Client, group: str, server_groups: Collection[str], limit: int) -> list[DeadLetter]:
    """List what a group gave up and nobody acted on, oldest first. The reasons stand in our own record of the tries."""
    found: dict[str, DeadLetter] = {}
    with _translated():
        for letter in await _letters(client, server_groups):
            stored = letter.stored
            if MARK in stored.properties:
                found.pop(stored.properties["KEYS"], None)
            else:
                message_id, attempt = message_id_of(stored.properties), max(1, stored.retries)
                found[stored.id] = DeadLetter(stored.id, group, letter.topic, message_id, "", attempt, stored.stored_at)
    return list(found.values())[:limit]


async def replay(client: Client, group: str, server_groups: Collection[str], ids: Collection[str]) -> int:
    """Send copies of dead letters to their group, of each letter one; return how many were sent."""
    count = 0
    with _translated():
        letters = await _open_ones(client, server_groups, ids)
        for letter in letters:
            if not await client.ports.find(letter.broker, letter.topic, letter.stored.id):
                await _send_copy(client, letter, group)
                count += 1
            await _send_mark(client, letter, "replayed")
        await _wait_until_seen(client, letters)
    return count


async def discard(client: Client, server_groups: Collection[str], ids: Collection[str]) -> int:
    """Mark dead letters as discarded; return how many were."""
    with _translated():
        letters = await _open_ones(client, server_groups, ids)
        for letter in letters:
            await _send_mark(client, letter, "discarded")
        await _wait_until_seen(client, letters)
    return len(letters)


async def topics_given_up(client: Client, broker: str, message_id: str) -> list[str]:
    """Name the topics in which some group gave a message up, and nobody acted on it. Raises as `Ports.ask`."""
    answer = await client.ports.ask(broker, Request(requests.GET_ALL_TOPICS))
    topics = json.loads(answer.checked().body)["topicConfigTable"]
    groups = [name.removeprefix(LETTERS) for name in topics if name.startswith(LETTERS)]
    found = [
        _letter(broker, group, stored)
        for group in groups
        for stored in await client.ports.find(broker, LETTERS + group, message_id)
    ]
    return [letter.topic for letter in found if not await _is_settled(client, letter)]


async def _letters(client: Client, server_groups: Collection[str]) -> list[Letter]:
    """Return the letters of all brokers, and marks, oldest first."""
    brokers = await addresses_of_all(client)
    queues = [await _read(client, broker, group) for broker in brokers for group in server_groups]
    return list(heapq.merge(*queues, key=lambda letter: letter.stored.stored_at))


async def _read(client: Client, broker: str, server_group: str) -> list[Letter]:
    letters: list[Letter] = []
    offset, is_behind = 0, True
    while is_behind:
        answer = await client.ports.ask(broker, requests.pull(LETTERS + server_group, 0, offset))
        if answer.code == NO_SUCH_TOPIC:  # the group never gave up anything
            return letters
        found, behind = requests.pulled(answer)
        letters += (_letter(broker, server_group, stored) for stored in found)
        is_behind, offset = behind > offset, behind
    return letters


def _letter(broker: str, server_group: str, stored: Stored) -> Letter:
    """Read where a letter came from: its topic, or the topic of the group's retries, which begins with the group's name."""
    topic = stored.properties.get("RETRY_TOPIC", stored.topic)
    if topic.startswith(RETRIES + server_group):
        topic = topic[len(RETRIES + server_group) + 1 :]
    return Letter(broker, topic, stored)


async def _open_ones(client: Client, server_groups: Collection[str], ids: Collection[str]) -> list[Letter]:
    """Find letters by their ids, each once, but for those that somebody acted on."""
    brokers = await addresses_of_all(client)
    found = [
        _letter(broker, group, stored)
        for one in sorted(set(ids))
        for broker in brokers
        for stored in await _look_at(client, broker, one)
        for group in server_groups
        if stored.topic == LETTERS + group
    ]
    return [letter for letter in found if not await _is_settled(client, letter)]


async def _look_at(client: Client, broker: str, letter_id: str) -> list[Stored]:
    """Read what lies at a letter's place; on another broker than its own that is nothing, another message, or no message."""
    try:
        place = int(letter_id[-16:], 16)
    except ValueError:
        return []
    found = requests.viewed(await client.ports.ask(broker, requests.view(place)))
    return [found] if found is not None and found.id == letter_id else []


async def _is_settled(client: Client, letter: Letter) -> bool:
    """Return whether a mark says that somebody acted on a letter."""
    return bool(await client.ports.find(letter.broker, letter.stored.topic, letter.stored.id))


async def _send_copy(client: Client, letter: Letter, group: str) -> None:
    """Send a copy to the queue that holds the messages of its key."""
    stored = letter.stored
    properties = {name: text for name, text in stored.properties.items() if name in KEPT or not THEIRS.match(name)}
    properties["KEYS"] = f"{properties.get('KEYS', '')} {stored.id}".strip()
    properties[ADDRESSEE] = group
    first = await client.ports.find(letter.broker, letter.topic, message_id_of(stored.properties))
    queue = first[0].queue if first else ANY_QUEUE
    request = requests.send_copy(letter.topic, queue, stored, properties)
    (await client.ports.ask(letter.broker, request)).checked()


async def _send_mark(client: Client, letter: Letter, what: str) -> None:
    stored = replace(letter.stored, body=what.encode(), flag=0)
    request = requests.send_copy(stored.topic, ANY_QUEUE, stored, {"KEYS": stored.id, MARK: what})
    (await client.ports.ask(letter.broker, request)).checked()


async def _wait_until_seen(client: Client, letters: Sequence[Letter]) -> None:
    """Return when the marks are found by their keys, so that nobody acts once more."""
    deadline = time.monotonic() + INDEX_SECONDS
    waiting = list(letters)
    while waiting and time.monotonic() < deadline:
        waiting = [letter for letter in waiting if not await _is_settled(client, letter)]
        await asyncio.sleep(0.01)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (RemotingError, ConnectionError) as error:
        raise BrokerUnavailable(f"RocketMQ's dead letters cannot be read or sent: {error}") from error
