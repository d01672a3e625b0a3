"""Build the message for the broker from its row and its position in a batch."""

from __future__ import annotations

from datetime import datetime

import msgspec

from outbox.batches.batch import ClaimedBatch
from outbox.brokers.base import Outgoing
from outbox.ids import published_at
from outbox.message import Header, Token, TopicType

SPEC_VERSION = "1.0"

_headers = msgspec.json.Decoder(dict[str, str])


class OutgoingBuilder:
    """
    Builds the outgoing messages of one batch, with the attributes of CloudEvents 1.0 as headers.

    Args:
        source: the stable id of this database.
        is_half: whether to add the token through which a check-back finds the batch.
    """

    __slots__ = ("_batch", "_is_delayed", "_is_half", "_is_ordered", "_lane", "_number", "_source")

    def __init__(self, batch: ClaimedBatch, *, source: str, is_half: bool) -> None:
        self._batch = batch
        self._source = source
        self._is_half = is_half
        self._is_ordered = batch.type is TopicType.FIFO
        self._is_delayed = batch.type is TopicType.DELAY
        self._lane = str(batch.lane)
        self._number = None if batch.first_seq is None else batch.first_seq - 1  # the number that position 0 would have

    def build(self, position: int, key: str, headers: str, about: str | None, body: bytes, *, half_id: str = "") -> Outgoing:
        """
        Return the outgoing message of a row.

        Args:
            key, headers, about, body: columns of the message row.
            half_id: as in `Outgoing`.

        Raises:
            ValueError: the delivery time in the headers cannot be read.
            msgspec.MsgspecError: the headers cannot be read.
        """
        batch = self._batch
        message_id = batch.message_ids[position - 1]
        attributes = _headers.decode(headers)
        attributes[Header.ID] = message_id
        attributes[Header.SOURCE] = self._source
        attributes[Header.TIME] = published_at(message_id)
        if Header.TYPE in attributes:  # a raw message has no type, so it is not a CloudEvent
            attributes[Header.SPEC_VERSION] = SPEC_VERSION
        if key:
            attributes[Header.SUBJECT] = key
        if about:
            attributes[Header.ABOUT] = about
        if self._number is not None:
            attributes[Header.LANE] = self._lane
            attributes[Header.NUMBER] = str(self._number + position)
        token = ""
        if self._is_half:
            attributes[Header.TOKEN] = token = str(Token(self._source, batch.id, batch.attempt, position))
        deliver_at = None
        if self._is_delayed and Header.DELIVER_AT in attributes:
            deliver_at = datetime.fromisoformat(attributes[Header.DELIVER_AT])
        if self._is_ordered and not key:
            key = message_id  # a message without a key was published before the topic was ordered
        tag = attributes.get(Header.TAG, "")
        return Outgoing(message_id, batch.topic, body, key, tag, attributes, token, deliver_at, half_id)
