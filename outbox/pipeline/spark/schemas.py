"""
The frames of a history: which columns each one has. Every source gives exactly these; every transform takes them.

Times are UTC. Lane and number are NULL where a message carries none: it waits, or went half first.
"""

from __future__ import annotations

from pyspark.sql.types import IntegerType, LongType, ShortType, StringType, StructField, StructType, TimestampType


def _schema(**columns: type) -> StructType:
    return StructType([StructField(name, kind()) for name, kind in columns.items()])


# Rows that owe a message. subject: name of the entry in settings; about: `shop.order:4711`.
BUSINESS = _schema(subject=StringType, about=StringType, at=TimestampType)

# Message rows, as publish wrote them.
MESSAGES = _schema(message_id=StringType, topic=StringType, key=StringType, type=StringType, about=StringType, at=TimestampType)

# Where each message stands: a place in a batch, a ticket, a delayed row. state: as outbox_message_state names it;
# at: when it came into that state, as far as that is written down.
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

# What a broker has stored and shows to consumers.
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

# What groups have handled.
INBOX = _schema(
    consumer_group=StringType,
    source=StringType,
    topic=StringType,
    lane=ShortType,
    number=LongType,
    message_id=StringType,
    nth=IntegerType,
    at=TimestampType,
)

# Deliveries that ended otherwise, one row per try. outcome: waiting, retry, dead letter, duplicate; of what operators did about
# dead letters: replay asked, replayed, discard asked, discarded.
ATTEMPTS = _schema(
    consumer_group=StringType,
    source=StringType,
    topic=StringType,
    lane=ShortType,
    number=LongType,
    message_id=StringType,
    nth=IntegerType,
    outcome=StringType,
    at=TimestampType,
)

# What each lane has given out: numbers first to last.
MARKS = _schema(source=StringType, topic=StringType, lane=ShortType, first=LongType, last=LongType)

FRAMES: dict[str, StructType] = {
    "business": BUSINESS,
    "messages": MESSAGES,
    "places": PLACES,
    "broker": BROKER,
    "inbox": INBOX,
    "attempts": ATTEMPTS,
    "marks": MARKS,
}
