"""What the demo's own day does not bring: messages that no broker takes, and such as no handler takes; halves of others."""

import json
import time
from uuid import uuid4

import psycopg

from tests.factories import message_id

# A message and its ticket, as publish() writes them; what publish() would have refused comes in this way only.
PUBLISH = """
WITH m AS (
    INSERT INTO outbox_message (id, topic_id, key, headers, body)
    SELECT %s, id, %s, %s, %s FROM outbox_topic WHERE name = 'orders' RETURNING id, topic_id
)
INSERT INTO outbox_ticket (message_id, topic_id) SELECT id, topic_id FROM m
"""

# A half message of another producer, which carries no token of ours.
HALF = """
INSERT INTO outbox_embedded_half
    (id, topic_id, queue, message_id, source, key, tag, headers, body, token, born_at, ask_at, asked, state)
SELECT nextval('outbox_embedded_half_id'), id, 0, %s, 'urn:warehouse', %s, '', '{}', '{}', '', now() - interval '3 hours',
    now() + interval '1 hour', %s, %s FROM outbox_embedded_topic WHERE name = 'orders'
"""

IS_DONE = """
SELECT (SELECT sum(cardinality(message_ids) - cardinality(split)) FROM outbox_batch WHERE state = 4) >= 3
    AND (SELECT count(*) FROM outbox_deferred WHERE dead_at IS NOT NULL) >= 2
    AND EXISTS (SELECT FROM outbox_failed_delivery WHERE outcome = 'retry' AND traceback <> '')
"""

TYPED = {"ce-type": "OrderPlaced", "ce-tag": "placed", "content-type": "application/json"}
TOO_LARGE = 4 * 1024 * 1024 + 1


def make(connection: psycopg.Connection) -> None:
    """Make the trouble, and wait until relay and consumers have met it."""
    for key in ("999001", "999002", "999003 \u202e<b>gnp.exe</b>"):
        _publish(connection, key, b'"' + b"x" * (TOO_LARGE - 2) + b'"')
    for key in ("999011", "999012"):
        _publish(connection, key, _order(key, total="0.00"))
    _publish(connection, "999021", _order("999021", total="EUR 17"), version=9)  # of a shop that is ahead of us
    for key, asked, state in (("W-17", 15, 1), ("W-18", 3, 0)):
        connection.execute(HALF, [str(uuid4()), key, asked, state])
    deadline = time.monotonic() + 40
    while connection.execute(IS_DONE).fetchone() != (True,):
        assert time.monotonic() < deadline, "relay or consumers have not met the trouble"
        time.sleep(0.2)


def _order(invoice: str, *, total: str) -> bytes:
    return json.dumps({"invoice": invoice, "customer": "17850", "items": 2, "total": total}).encode()


def _publish(connection: psycopg.Connection, key: str, body: bytes, *, version: int = 1) -> None:
    one = message_id()
    headers = {"ce-id": str(one), "ce-source": "urn:shop", "ce-typeversion": str(version), **TYPED}
    connection.execute(PUBLISH, [one, key, json.dumps(headers), body])
