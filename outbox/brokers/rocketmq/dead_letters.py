"""
What groups gave up, asked of the brokers' own ports, and sent again for the one group that a person names.

RocketMQ keeps dead letters in a topic for each group, `%DLQ%<group>`, as long as its log (`fileReservedTime`). Reading them
moves no offset: a letter stays until a person acts. Nothing can be taken out of the log; so acting is adding to it:
- a replay is a copy on the topic that the letter came from, addressed to its group: the adapter passes it over in others;
- a discard is a mark among the dead letters.
Both have the letter's id among their keys, by which anybody can see that somebody acted.
"""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
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
)
from outbox.errors import BrokerUnavailable

LETTERS, RETRIES = "%DLQ%", "%RETRY%"

# Of the properties that are the server's, what a copy keeps: it is found, filtered and ordered as the first one was.
KEPT = {"KEYS", "TAGS", "UNIQ_KEY", "__SHARDINGKEY"}

INDEX_SECONDS = 5.0  # a message is found by its keys a moment after it was stored
ANY_QUEUE = -1

DISCARDED = "outbox-discarded"  # property of a mark


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter where it lies. `topic`: where it was read."""

    broker: tuple[str, int]
    topic: str
    stored: Stored

    @property
    def is_open(self) -> bool:
        """Whether nobody acted on it."""
        return not any(_find(self.broker, topic, self.stored.id) for topic in (self.topic, self.stored.topic))


def dead_letters(options: RocketMQOptions, group: str, server_groups: Collection[str], limit: int) -> list[DeadLetter]:
    """List what a group gave up and nobody acted on, oldest first. The reasons stand in our own record of the tries."""
    found: list[DeadLetter] = []
    with _translated():
        for letter in _letters(options, server_groups):
            if len(found) == limit:
                break
            if letter.is_open:
                stored = letter.stored
                message_id = message_id_of(stored.properties)
                found.append(DeadLetter(stored.id, group, letter.topic, message_id, "", max(1, stored.retries), stored.stored_at))
    return found


def replay(options: RocketMQOptions, group: str, server_groups: Collection[str], ids: Collection[str]) -> int:
    """Send copies of dead letters to their group, of each letter one; give how many were sent."""
    return _act(options, server_groups, ids, lambda letter: _send_copy(letter, group))


def discard(options: RocketMQOptions, server_groups: Collection[str], ids: Collection[str]) -> int:
    """Mark dead letters as discarded; give how many were."""
    return _act(options, server_groups, ids, _send_mark)


def _act(options: RocketMQOptions, server_groups: Collection[str], ids: Collection[str], act: Callable[[Letter], None]) -> int:
    done = []
    with _translated():
        for letter in _letters(options, server_groups):
            if letter.stored.id in ids and letter.is_open:
                act(letter)
                done.append(letter)
        _wait_until_seen(done)
    return len(done)


def topics_given_up(broker: tuple[str, int], message_id: str) -> set[str]:
    """Name the topics in which some group gave a message up, and nobody acted on it. Raises as remoting."""
    topics = json.loads(call(broker, GET_ALL_TOPICS))["topicConfigTable"]
    groups = [name.removeprefix(LETTERS) for name in topics if name.startswith(LETTERS)]
    found = [_letter(broker, group, stored) for group in groups for stored in _find(broker, LETTERS + group, message_id)]
    return {letter.topic for letter in found if letter.is_open}


def _letters(options: RocketMQOptions, server_groups: Collection[str]) -> Iterator[Letter]:
    """Give the letters of all brokers, oldest first."""
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
        yield from (_letter(broker, server_group, stored) for stored in found if DISCARDED not in stored.properties)
        is_behind, offset = behind > offset, behind


def _letter(broker: tuple[str, int], server_group: str, stored: Stored) -> Letter:
    """Read where a letter came from: its topic, or the topic of the group's retries, which begins with the group's name."""
    topic = stored.properties.get("RETRY_TOPIC", stored.topic)
    if topic.startswith(RETRIES + server_group):
        topic = topic[len(RETRIES + server_group) + 1 :]
    return Letter(broker, topic, stored)


def _send_copy(letter: Letter, group: str) -> None:
    """Send a copy to the queue that holds the messages of its key."""
    stored = letter.stored
    properties = {name: text for name, text in stored.properties.items() if name in KEPT or not THEIRS.match(name)}
    properties["KEYS"] = f"{properties.get('KEYS', '')} {stored.id}".strip()
    properties[ADDRESSEE] = group
    first = _find(letter.broker, letter.topic, message_id_of(stored.properties))
    send(letter.broker, letter.topic, first[0].queue if first else ANY_QUEUE, stored, properties)


def _send_mark(letter: Letter) -> None:
    properties = {"KEYS": letter.stored.id, DISCARDED: letter.stored.id}
    send(letter.broker, letter.stored.topic, ANY_QUEUE, replace(letter.stored, body=b"discarded", flag=0), properties)


def _wait_until_seen(letters: Sequence[Letter]) -> None:
    """Return when all can see that somebody acted, so that nobody does once more."""
    deadline = time.monotonic() + INDEX_SECONDS
    while time.monotonic() < deadline and any(letter.is_open for letter in letters):
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
