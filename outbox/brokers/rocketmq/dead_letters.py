"""
What groups gave up, asked of the brokers' own ports, and sent again for the one group that a person names.

RocketMQ keeps dead letters in a topic for each group, `%DLQ%<group>`, as long as its log (`fileReservedTime`). Reading them
moves no offset: a letter stays until a person acts. Nothing can be taken out of the log; so acting is adding to it:
- a replay is a copy on the topic that the letter came from, addressed to its group: the adapter passes it over in others;
- a mark among the dead letters says that one was replayed or discarded.
Copy and mark have the letter's id among their keys. The copy comes first: whoever dies before the mark leaves a letter that
is still listed, and is not sent twice.
"""

from __future__ import annotations

import heapq
import json
import struct
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from outbox.brokers.base import DeadLetter
from outbox.brokers.rocketmq.envelope import ADDRESSEE, THEIRS, message_id_of
from outbox.brokers.rocketmq.options import RocketMQOptions, address
from outbox.brokers.rocketmq.remoting import (
    GET_ALL_TOPICS,
    NO_SUCH_TOPIC,
    NOTHING_FOUND,
    RemotingError,
    Stored,
    call,
    pull,
    query,
    send,
    view,
)
from outbox.errors import BrokerUnavailable

LETTERS, RETRIES = "%DLQ%", "%RETRY%"

MARK = "outbox-settled"  # property of a mark: replayed or discarded

# Of the properties that are the server's, what a copy keeps: it is found, filtered and ordered as the first one was.
KEPT = {"KEYS", "TAGS", "UNIQ_KEY", "__SHARDINGKEY"}

INDEX_SECONDS = 5.0  # a message is found by its keys a moment after it was stored
ANY_QUEUE = -1


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter where it lies. `topic`: where it was read."""

    broker: tuple[str, int]
    topic: str
    stored: Stored

    @property
    def is_copied(self) -> bool:
        """Whether a copy of it was sent."""
        return bool(_find(self.broker, self.topic, self.stored.id))

    @property
    def is_settled(self) -> bool:
        """Whether a mark says that somebody acted on it."""
        return bool(_find(self.broker, self.stored.topic, self.stored.id))


def dead_letters(options: RocketMQOptions, group: str, server_groups: Collection[str], limit: int) -> list[DeadLetter]:
    """List what a group gave up and nobody acted on, oldest first. The reasons stand in our own record of the tries."""
    found: dict[str, DeadLetter] = {}
    with _translated():
        for letter in _letters(options, server_groups):
            stored = letter.stored
            if MARK in stored.properties:
                found.pop(stored.properties["KEYS"], None)
            else:
                message_id, attempt = message_id_of(stored.properties), max(1, stored.retries)
                found[stored.id] = DeadLetter(stored.id, group, letter.topic, message_id, "", attempt, stored.stored_at)
    return list(found.values())[:limit]


def replay(options: RocketMQOptions, group: str, server_groups: Collection[str], ids: Collection[str]) -> int:
    """Send copies of dead letters to their group, of each letter one; give how many were sent."""
    count = 0
    with _translated():
        letters = _open_ones(options, server_groups, ids)
        for letter in letters:
            if not letter.is_copied:
                _send_copy(letter, group)
                count += 1
            _send_mark(letter, "replayed")
        _wait_until_seen(letters)
    return count


def discard(options: RocketMQOptions, server_groups: Collection[str], ids: Collection[str]) -> int:
    """Mark dead letters as discarded; give how many were."""
    with _translated():
        letters = _open_ones(options, server_groups, ids)
        for letter in letters:
            _send_mark(letter, "discarded")
        _wait_until_seen(letters)
    return len(letters)


def topics_given_up(broker: tuple[str, int], message_id: str) -> set[str]:
    """Name the topics in which some group gave a message up, and nobody acted on it. Raises as remoting."""
    topics = json.loads(call(broker, GET_ALL_TOPICS))["topicConfigTable"]
    groups = [name.removeprefix(LETTERS) for name in topics if name.startswith(LETTERS)]
    found = [_letter(broker, group, stored) for group in groups for stored in _find(broker, LETTERS + group, message_id)]
    return {letter.topic for letter in found if not letter.is_settled}


def _letters(options: RocketMQOptions, server_groups: Collection[str]) -> Iterator[Letter]:
    """Give the letters of all brokers, and marks, oldest first."""
    brokers = [address(text) for text in options.broker_addresses]
    queues = [_read(broker, group) for broker in brokers for group in server_groups]
    return heapq.merge(*queues, key=lambda letter: letter.stored.stored_at)


def _read(broker: tuple[str, int], server_group: str) -> Iterator[Letter]:
    offset, is_behind = 0, True
    while is_behind:
        try:
            found, behind = pull(broker, LETTERS + server_group, offset)
        except RemotingError as error:
            if error.code == NO_SUCH_TOPIC:  # the group never gave up anything
                return
            raise
        yield from (_letter(broker, server_group, stored) for stored in found)
        is_behind, offset = behind > offset, behind


def _letter(broker: tuple[str, int], server_group: str, stored: Stored) -> Letter:
    """Read where a letter came from: its topic, or the topic of the group's retries, which begins with the group's name."""
    topic = stored.properties.get("RETRY_TOPIC", stored.topic)
    if topic.startswith(RETRIES + server_group):
        topic = topic[len(RETRIES + server_group) + 1 :]
    return Letter(broker, topic, stored)


def _open_ones(options: RocketMQOptions, server_groups: Collection[str], ids: Collection[str]) -> list[Letter]:
    """Find letters by their ids, each once, but for those that somebody acted on."""
    found = [
        _letter(broker, group, stored)
        for one in sorted(set(ids))
        for broker in [address(text) for text in options.broker_addresses]
        for stored in _look_at(broker, one)
        for group in server_groups
        if stored.topic == LETTERS + group
    ]
    return [letter for letter in found if not letter.is_settled]


def _look_at(broker: tuple[str, int], letter_id: str) -> list[Stored]:
    """Read what lies at a letter's place; on another broker than its own that is nothing, another message, or no message."""
    try:
        found = view(broker, int(letter_id[-16:], 16))
    except (RemotingError, struct.error, ValueError, IndexError):
        return []
    return [found] if found.id == letter_id else []


def _send_copy(letter: Letter, group: str) -> None:
    """Send a copy to the queue that holds the messages of its key."""
    stored = letter.stored
    properties = {name: text for name, text in stored.properties.items() if name in KEPT or not THEIRS.match(name)}
    properties["KEYS"] = f"{properties.get('KEYS', '')} {stored.id}".strip()
    properties[ADDRESSEE] = group
    first = _find(letter.broker, letter.topic, message_id_of(stored.properties))
    send(letter.broker, letter.topic, first[0].queue if first else ANY_QUEUE, stored, properties)


def _send_mark(letter: Letter, what: str) -> None:
    stored = replace(letter.stored, body=what.encode(), flag=0)
    send(letter.broker, stored.topic, ANY_QUEUE, stored, {"KEYS": stored.id, MARK: what})


def _wait_until_seen(letters: Sequence[Letter]) -> None:
    """Return when the marks are found by their keys, so that nobody acts once more."""
    deadline = time.monotonic() + INDEX_SECONDS
    while time.monotonic() < deadline and not all(letter.is_settled for letter in letters):
        time.sleep(0.01)


def _find(broker: tuple[str, int], topic: str, key: str) -> list[Stored]:
    try:
        return query(broker, topic, key)
    except RemotingError as error:
        if error.code in (NOTHING_FOUND, NO_SUCH_TOPIC):
            return []
        raise


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (RemotingError, OSError) as error:
        raise BrokerUnavailable(f"RocketMQ's dead letters cannot be read or sent: {error}") from error
