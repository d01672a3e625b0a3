"""The place of a half message: its broker, its offset in the broker's log, and its offset in the queue of half messages there."""

from __future__ import annotations

from typing import NamedTuple

from outbox.brokers.rocketmq.remoting.frames import RemotingAnswer, StoredMessage

HALVES = "RMQ_SYS_TRANS_HALF_TOPIC"  # the server's topic of half messages
LOG_DIGITS = 16  # the number of hexadecimal digits at the end of an answer's msgId that are the offset in the log


class HalfPlace(NamedTuple):
    """Where a broker stores a half message. `str()` formats it as `HalfRef.place`."""

    broker: str
    log_offset: int
    queue_offset: int

    def __str__(self) -> str:
        return f"{self.broker} {self.log_offset} {self.queue_offset}"

    @classmethod
    def read(cls, text: str) -> HalfPlace | None:
        """Parse `HalfRef.place`. None: it is empty, or has another format."""
        broker, *offsets = text.split(" ")
        if len(offsets) != 2 or not all(offset.isascii() and offset.isdecimal() for offset in offsets):
            return None
        return cls(broker, int(offsets[0]), int(offsets[1]))

    @classmethod
    def of_answer(cls, broker: str, answer: RemotingAnswer) -> HalfPlace:
        """Return the place of a half message from the broker's answer to the send."""
        return cls(broker, int(answer.fields["msgId"][-LOG_DIGITS:], 16), int(answer.fields["queueOffset"]))

    @classmethod
    def of_stored(cls, broker: str, stored: StoredMessage) -> HalfPlace:
        """Return the place of a half message that was read from a broker."""
        return cls(broker, stored.log_offset, stored.queue_offset)
