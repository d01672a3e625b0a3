"""Conversion of messages to rows, and of rows to deliveries."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from outbox.brokers.base import Delivery, Outgoing
from outbox.embedded.topics import StoredTopic
from outbox.message import Header

MESSAGE_COLUMNS = "topic_id, queue, message_id, source, key, tag, headers, body"

# The parameters for many messages are one array per column, in binary format, because bodies in text arrays take ten times as
# long.
MESSAGE_ARRAYS = """%(topic_ids)b::int[], %(queues)b::smallint[], %(message_ids)b::text[], %(sources)b::text[],
    %(keys)b::text[], %(tags)b::text[], %(headers)b::text[], %(bodies)b::bytea[]"""
_ARRAY_NAMES = ("topic_ids", "queues", "message_ids", "sources", "keys", "tags", "headers", "bodies")


# The values of MESSAGE_COLUMNS, in their order.
EmbeddedRow = tuple[int, int, str, str, str, str, str, bytes]


class ReadRow(NamedTuple):
    """A delivery with its message, as the statements of `receiver.py` return it; their comments explain rows with NULLs."""

    delivery_id: int
    delivery_count: int
    topic_id: int
    message_id: str
    key: str
    tag: str
    headers: str
    body: bytes
    stored_at: datetime


def message_row(message: Outgoing, topic: StoredTopic, keyless_queue: int) -> EmbeddedRow:
    """Return the row of a message. A message without a key goes to `keyless_queue`."""
    return (
        topic.id,
        topic.queue_of(message.key) if message.key else keyless_queue,
        message.message_id,
        message.headers.get(Header.SOURCE, ""),
        message.key,
        message.tag,
        msgspec.json.encode(message.headers).decode(),
        message.body,
    )


def arrays(rows: Sequence[EmbeddedRow]) -> dict[str, list[Any]]:
    """Return the parameters of MESSAGE_ARRAYS for rows."""
    return dict(zip(_ARRAY_NAMES, map(list, zip(*rows, strict=True)), strict=True))


def delivery(group: str, topic: str, row: ReadRow) -> Delivery:
    """Return the delivery of a row. Its receipt consists of the row's id and delivery count."""
    return Delivery(
        group=group,
        topic=topic,
        message_id=row.message_id,
        body=row.body,
        receipt=f"{row.delivery_id}:{row.delivery_count}",
        key=row.key,
        tag=row.tag,
        headers=msgspec.json.decode(row.headers, type=dict[str, str]),
        delivery_count=row.delivery_count,
        stored_at=row.stored_at,
    )
