"""The envelope: a message row and its place in a batch become what is handed to the broker."""

from __future__ import annotations

from datetime import datetime

import msgspec

from outbox.batches.batch import Batch
from outbox.brokers.base import Outgoing
from outbox.ids import published_at
from outbox.message import Header, Token, TopicType

SPEC_VERSION = "1.0"

_headers = msgspec.json.Decoder(dict[str, str])


class Sealer:
    """
    Makes what travels of the messages of one batch.

    Source: CloudEvents 1.0, attributes in headers.

    Args:
        source: the stable id of this database.
        is_half: give each message the token by which a check-back finds it again.
    """

    __slots__ = ("_batch", "_is_delayed", "_is_half", "_is_ordered", "_lane", "_number", "_source")

    def __init__(self, batch: Batch, *, source: str, is_half: bool) -> None:
        self._batch = batch
        self._source = source
        self._is_half = is_half
        self._is_ordered = batch.type is TopicType.FIFO
        self._is_delayed = batch.type is TopicType.DELAY
        self._lane = str(batch.lane)
        self._number = None if batch.first_seq is None else batch.first_seq - 1  # of position 0

    def seal(self, position: int, key: str, headers: str, about: str | None, body: bytes, *, half_id: str = "") -> Outgoing:
        """
        Make what travels of a message.

        Args:
            key, headers, about, body: as its row has them.
            half_id: as `Outgoing` has it.

        Raises:
            ValueError: the headers or the time stored with the row cannot be read.
        """
        batch = self._batch
        message_id = batch.message_ids[position - 1]
        sealed = _headers.decode(headers)
        sealed[Header.ID] = message_id
        sealed[Header.SOURCE] = self._source
        sealed[Header.TIME] = published_at(message_id)
        if Header.TYPE in sealed:  # a raw message has none, and without one it is no CloudEvent
            sealed[Header.SPEC_VERSION] = SPEC_VERSION
        if key:
            sealed[Header.SUBJECT] = key
        if about:
            sealed[Header.ABOUT] = about
        if self._number is not None:
            sealed[Header.LANE] = self._lane
            sealed[Header.NUMBER] = str(self._number + position)
        token = ""
        if self._is_half:
            sealed[Header.TOKEN] = token = str(Token(self._source, batch.id, batch.attempt, position))
        deliver_at = None
        if self._is_delayed and Header.DELIVER_AT in sealed:
            deliver_at = datetime.fromisoformat(sealed[Header.DELIVER_AT])
        if self._is_ordered and not key:
            key = message_id  # published before the topic kept order
        return Outgoing(message_id, batch.topic, body, key, sealed.get(Header.TAG, ""), sealed, token, deliver_at, half_id)
