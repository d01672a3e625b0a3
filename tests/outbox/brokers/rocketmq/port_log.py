"""The log of a stubbed broker: messages and half messages one behind the other, and an index of their keys."""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from msgspec.structs import replace

from outbox.brokers.rocketmq.places import HALVES
from outbox.brokers.rocketmq.remoting.frames import HALF, IPV6_BORN, IPV6_STORED, LONG_TOPIC, StoredMessage, write_properties
from outbox.brokers.rocketmq.remoting.requests import COMMIT_TYPE

BYTES = 1000  # of each message: places in the log are multiples of it
QUEUES = 2

IPV4 = bytes([127, 0, 0, 1]) + struct.pack(">i", 10911)
IPV6 = bytes(15) + b"\x01" + struct.pack(">i", 10911)
SHORT_TOPIC = b"\xda\xa3\x20\xa7"


@dataclass(frozen=True, slots=True)
class End:
    """An end that a half message got."""

    half_id: str
    kind: int


class Log:
    """What a broker stores. `now` may be replaced, for messages of another time."""

    def __init__(self) -> None:
        self.messages: dict[int, StoredMessage] = {}  # by place
        self.ends: list[End] = []
        self.now: Callable[[], datetime] = lambda: datetime.now(UTC)
        self._indexed: set[int] = set()

    def append(self, topic: str, properties: Mapping[str, str], body: bytes = b"{}", flag: int = 0) -> StoredMessage:
        """Store a message; the place of a half message is among half messages."""
        is_half = bool(flag & HALF)
        queue = 0 if is_half else len(self.messages) % QUEUES
        properties = {**properties, "REAL_TOPIC": topic} if is_half else dict(properties)
        topic = HALVES if is_half else topic
        place = BYTES * (1 + len(self.messages))
        offset = len(self.of(topic, queue))
        name = (IPV4 + struct.pack(">q", place)).hex().upper()
        stored = StoredMessage(name, topic, queue, properties, flag, 0, self.now(), body, offset, place)
        self.messages[place] = stored
        self._indexed.add(place)
        return stored

    def append_half(self, topic: str, half_id: str) -> StoredMessage:
        """Store a half message, as one that was sent."""
        return self.append(topic, {"UNIQ_KEY": half_id, "KEYS": half_id.partition(".")[0], "TRAN_MSG": "true"}, flag=HALF)

    def append_again(self, half: StoredMessage) -> StoredMessage:
        """Store a half message again, as a server does before it asks about it."""
        return self.append(half.properties["REAL_TOPIC"], {**half.properties, "TRANSACTION_CHECK_TIMES": "1"}, flag=HALF)

    def end(self, place: int, queue_offset: int, kind: int) -> StoredMessage | None:
        """End the half message at a place; return it, None where it is not."""
        half = self.messages.get(place)
        if half is None or half.topic != HALVES or half.queue_offset != queue_offset:
            return None
        self.ends.append(End(half.properties["UNIQ_KEY"], kind))
        if kind == COMMIT_TYPE:
            self.append(half.properties["REAL_TOPIC"], half.properties, half.body)
        return half

    def of(self, topic: str, queue: int | None = None) -> list[StoredMessage]:
        """Return the messages of a topic, or of one of its queues."""
        return [one for one in self.messages.values() if one.topic == topic and queue in (None, one.queue)]

    def find(self, topic: str, key: str) -> list[StoredMessage]:
        """Return what the index has of a key, newest first."""
        found = [one for one in self.of(topic) if one.log_offset in self._indexed]
        return [one for one in reversed(found) if key in (one.properties["UNIQ_KEY"], *one.properties.get("KEYS", "").split())]

    def forget_index(self) -> None:
        """Find nothing by its key any more that is there now, as after a crash."""
        self._indexed.clear()

    def lose(self, stored: StoredMessage) -> None:
        """Store something else at the place of a message, as in a broker that was restored from a backup."""
        self.messages[stored.log_offset] = replace(stored, properties={**stored.properties, "UNIQ_KEY": "another.1"})
        self._indexed.discard(stored.log_offset)


def write_stored(stored: StoredMessage, host: bytes = IPV4) -> bytes:
    """Write a message as a broker stores it; with another host, the address has as many bytes."""
    flag = stored.flag | (IPV6_BORN | IPV6_STORED if len(host) > len(IPV4) else 0)
    topic, properties = stored.topic.encode(), write_properties(stored.properties).encode()
    is_long = len(topic) > 127
    milliseconds = round(stored.stored_at.timestamp() * 1000)
    data = LONG_TOPIC if is_long else SHORT_TOPIC
    data += struct.pack(">iiiqqi", 0, stored.queue, 0, stored.queue_offset, stored.log_offset, flag)
    data += struct.pack(">q", milliseconds) + host + struct.pack(">q", milliseconds) + host
    data += struct.pack(">iqi", stored.retries, 0, len(stored.body)) + stored.body
    data += struct.pack(">h" if is_long else ">b", len(topic)) + topic
    data += struct.pack(">h", len(properties)) + properties
    return struct.pack(">i", 4 + len(data)) + data
