"""The envelope: a message row and its place in a batch become what is handed to the broker."""

from __future__ import annotations

from datetime import datetime

import msgspec

from outbox.batches.batch import Batch
from outbox.brokers.base import Outgoing
from outbox.ids import published_at
from outbox.message import Header, Token, TopicType
from outbox.relay.load import Row

SPEC_VERSION = "1.0"

_headers = msgspec.json.Decoder(dict[str, str])


def seal(row: Row, batch: Batch, position: int, *, source: str, is_half: bool) -> Outgoing:
    """
    Make what travels of a message.

    Source: CloudEvents 1.0, attributes in headers.

    Args:
        source: the stable id of this database.
        is_half: give it the token by which a check-back finds it again.

    Raises:
        ValueError: the headers or the time stored with the row cannot be read.
    """
    message_id = batch.message_ids[position - 1]
    headers = _headers.decode(row.headers)
    headers |= {
        Header.ID: message_id,
        Header.SOURCE: source,
        Header.TIME: published_at(message_id),
    }
    if Header.TYPE in headers:  # a raw message has none, and without one it is no CloudEvent
        headers[Header.SPEC_VERSION] = SPEC_VERSION
    if row.key:
        headers[Header.SUBJECT] = row.key
    if row.about:
        headers[Header.ABOUT] = row.about
    if batch.first_seq is not None:
        headers[Header.LANE] = str(batch.lane)
        headers[Header.NUMBER] = str(batch.first_seq + position - 1)
    token = ""
    if is_half:
        headers[Header.TOKEN] = token = str(Token(source, batch.id, batch.attempt, position))
    deliver_at = None
    if batch.type is TopicType.DELAY and Header.DELIVER_AT in headers:
        deliver_at = datetime.fromisoformat(headers[Header.DELIVER_AT])
    key = row.key or (message_id if batch.type is TopicType.FIFO else "")  # published before the topic kept order
    return Outgoing(message_id, batch.topic, row.body, key, headers.get(Header.TAG, ""), headers, token, deliver_at)
