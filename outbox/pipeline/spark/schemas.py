"""
The frames of a history and their columns. Every source provides exactly these; every transform takes them.

Times are UTC. Lane and number are NULL for messages without a number: they are waiting, or were sent half first.
"""

from __future__ import annotations

from pyspark.sql.types import IntegerType, LongType, ShortType, StringType, StructField, StructType, TimestampType


def _schema(**columns: type) -> StructType:
    return StructType([StructField(name, kind()) for name, kind in columns.items()])


# Rows that must have a message. subject: name of the entry in settings; about: `shop.order:4711`.
BUSINESS = _schema(subject=StringType, about=StringType, at=TimestampType)

# Message rows, as written by publish.
MESSAGES = _schema(message_id=StringType, topic=StringType, key=StringType, type=StringType, about=StringType, at=TimestampType)

# The place of each message: a position in a batch, a ticket, a delayed row. state: as in outbox_message_state;
# at: when it entered that state, as far as that is stored.
PLACES = _schema(
    source=StringType,
    topic=StringType,
    lane=ShortType,
    number=LongType,
    message_id=StringType,
    state=StringType,
    claimed_at=TimestampType,
    at=TimestampType,
)

# Messages that a broker has stored and made visible.
BROKER = _schema(
    source=StringType,
    topic=StringType,
    lane=ShortType,
    number=LongType,
    message_id=StringType,
    key=StringType,
    queue=IntegerType,
    pos=LongType,
    at=TimestampType,
)

# Messages that groups have handled.
INBOX = _schema(
    consumer_group=StringType,
    source=StringType,
    topic=StringType,
    lane=ShortType,
    number=LongType,
    message_id=StringType,
    delivery_count=IntegerType,
    at=TimestampType,
)

# Messages that a group has not handled, by state (outcome): waiting at the broker, deferred, dead, discarded. And the log of
# deliveries that failed or were dropped: retry, dead letter, duplicate.
FAILED_DELIVERIES = _schema(
    consumer_group=StringType,
    source=StringType,
    topic=StringType,
    lane=ShortType,
    number=LongType,
    message_id=StringType,
    delivery_count=IntegerType,
    outcome=StringType,
    at=TimestampType,
)

# The numbers that each lane has assigned, first to last.
MARKS = _schema(source=StringType, topic=StringType, lane=ShortType, first=LongType, last=LongType)

FRAMES: dict[str, StructType] = {
    "business": BUSINESS,
    "messages": MESSAGES,
    "places": PLACES,
    "broker": BROKER,
    "inbox": INBOX,
    "failed_deliveries": FAILED_DELIVERIES,
    "marks": MARKS,
}
