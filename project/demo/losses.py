"""Inject losses: delete rows at each stage, and return the findings that the audit has to report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

Connection = psycopg.Connection[tuple[Any, ...]]

# Messages that passed all stages, each with its lane and number; the oldest first.
WHOLE = """
SELECT u.id, t.name, b.lane, b.first_seq + u.position - 1, m.about, b.id
FROM outbox_batch b CROSS JOIN unnest(b.message_ids) WITH ORDINALITY u(id, position)
JOIN outbox_topic t ON t.id = b.topic_id JOIN outbox_message m ON m.id = u.id
WHERE b.state = 3 AND u.position::smallint <> ALL (b.split) AND t.name = %s ORDER BY u.id
"""

# An order for which no message is published.
ORDER_WITHOUT_MESSAGE = """
INSERT INTO shop_order (invoice, country, invoiced_at, total) VALUES ('lost-on-purpose', 'United Kingdom', now(), 1) RETURNING id
"""

# A message row without a ticket, so no relay sends it.
MESSAGE_WITHOUT_TICKET = """
INSERT INTO outbox_message (id, topic_id, key, body)
SELECT %s::uuid, id, 'lost-on-purpose', '' FROM outbox_topic WHERE name = 'orders'
"""

# Assigned numbers that are at no stage, as after the deletion of a batch with all its messages.
NUMBERS_WITHOUT_BATCH = """
UPDATE outbox_lane l SET last_seq = last_seq + 3 FROM outbox_topic t WHERE t.id = l.topic_id AND t.name = 'orders'
AND l.lane = %s RETURNING last_seq
"""


@dataclass(frozen=True, order=True)
class Expected:
    """The expected finding about one loss: its kind and stage, and the messages that it names."""

    kind: str
    stage: str
    topic: str
    group: str = ""
    numbers: tuple[int, int, int] | None = None  # lane, first, last
    names: tuple[str, ...] = ()  # message ids or business rows, if there are no numbers

    def __str__(self) -> str:
        stage = f"{self.stage} of {self.group}" if self.group else self.stage
        messages = (
            f"lane {self.numbers[0]}, numbers {self.numbers[1]} to {self.numbers[2]}" if self.numbers else ", ".join(self.names)
        )
        return f"{self.kind} at {stage}: {self.topic} {messages}"


def inject(connection: Connection) -> list[Expected]:
    """Delete rows at each stage; return the expected findings."""
    orders, shipments = (connection.execute(WHOLE, [topic]).fetchall() for topic in ("orders", "shipments"))
    return [
        *_at_business(connection, shipments[0]),
        *_at_outbox(connection, orders),
        *_at_broker(connection, shipments[10]),
        *_at_inbox(connection, orders[30:32]),
    ]


def _at_business(connection: Connection, shipped: tuple[Any, ...]) -> list[Expected]:
    ((order,),) = connection.execute(ORDER_WITHOUT_MESSAGE).fetchall()
    about = shipped[4]
    connection.execute("DELETE FROM shop_shipment WHERE id = %s", [int(about.split(":")[1])])
    return [
        Expected("lost", "outbox", "orders", names=(f"shop.order:{order}",)),
        Expected("orphan", "outbox", "shipments", names=(about,)),
    ]


def _at_outbox(connection: Connection, orders: list[tuple[Any, ...]]) -> list[Expected]:
    row_gone, batch_gone = orders[5], orders[20]
    connection.execute("DELETE FROM outbox_message WHERE id = %s", [row_gone[0]])
    connection.execute("DELETE FROM outbox_batch WHERE id = %s", [batch_gone[5]])
    of_batch = [order for order in orders if order[5] == batch_gone[5]]
    stranded = _stranded_id(row_gone[0])
    connection.execute(MESSAGE_WITHOUT_TICKET, [stranded])
    lane = row_gone[2]
    ((last,),) = connection.execute(NUMBERS_WITHOUT_BATCH, [lane]).fetchall()
    numbers = sorted(order[3] for order in of_batch)
    without_place = tuple(sorted([stranded, *(str(order[0]) for order in of_batch)]))
    return [
        Expected("lost", "outbox", "orders", names=(str(row_gone[0]),)),
        Expected("lost", "outbox", "orders", names=(row_gone[4],)),
        Expected("lost", "outbox", "orders", names=without_place),
        Expected("orphan", "broker", "orders", numbers=(batch_gone[2], numbers[0], numbers[-1])),
        Expected("lost", "outbox", "orders", numbers=(lane, last - 2, last)),
    ]


def _stranded_id(like: Any) -> str:
    """Return a new id with the same time as another id."""
    return f"{str(like)[:24]}{'0' * 12}"


def _at_broker(connection: Connection, message: tuple[Any, ...]) -> list[Expected]:
    connection.execute("DELETE FROM outbox_embedded_message WHERE message_id = %s", [str(message[0])])
    _, topic, lane, number, *_ = message
    return [Expected("lost", "broker", topic, numbers=(lane, number, number))]


def _at_inbox(connection: Connection, messages: list[tuple[Any, ...]]) -> list[Expected]:
    expected = []
    for group, (message_id, topic, lane, number, *_) in zip(("points", "cart"), messages, strict=True):
        connection.execute("DELETE FROM outbox_inbox WHERE consumer_group = %s AND message_id = %s", [group, message_id])
        expected.append(Expected("lost", "inbox", topic, group, (lane, number, number)))
    return expected


def as_expected(finding: dict[str, Any]) -> Expected:
    """Return a finding of the audit's report in the form of an expectation."""
    numbers = None
    if finding["lane"] is not None:
        numbers = (finding["lane"], finding["first"], finding["last"])
    names = () if numbers else tuple(sorted([*finding["ids"], *finding["about"]]))
    return Expected(finding["kind"], finding["stage"], finding["topic"], finding["group"], numbers, names)


def together(expected: list[Expected]) -> list[Expected]:
    """Merge expectations that the audit reports as one finding: business rows of one kind without a message."""
    rows = [finding for finding in expected if finding.names and finding.names[0].startswith("shop.") and finding.kind == "lost"]
    others = [finding for finding in expected if finding not in rows]
    names = tuple(sorted(name for finding in rows for name in finding.names))
    return sorted([*others, Expected("lost", "outbox", "orders", names=names)], key=str)
