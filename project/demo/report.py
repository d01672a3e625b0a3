"""
The results of the demo, counted from the database: business rows, messages, batches, check-backs, inbox and effects.

Only the number of kills is not in the database. The broker's messages are in two temporary relations that `brokers.py` creates:
demo_visible (message_id, key), with a row for each copy that consumers could see, and demo_half (id).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psycopg

from project.demo.kills import CELERY, COMMITTED, CONFIRMED, HALF_SENT, LONG_RUNNING, UNACKED, Kill
from project.demo.outage import Outage

Connection = psycopg.Connection[tuple[Any, ...]]

# The expected and actual effects of each group, and its topics.
LEDGERS = """
WITH owed (consumer_group, invoice) AS (
    SELECT consumer_group, invoice FROM shop_order, unnest(ARRAY['cart', 'shipment', 'letters']) consumer_group
    UNION ALL SELECT 'points', invoice FROM shop_order WHERE customer_id IS NOT NULL
    UNION ALL SELECT 'points', invoice FROM shop_cancellation WHERE customer_id IS NOT NULL
), effect (consumer_group, invoice) AS (
    SELECT 'cart', invoice FROM shop_cartentry WHERE change < 0
    UNION ALL SELECT 'points', invoice FROM shop_pointsentry
    UNION ALL SELECT 'shipment', invoice FROM shop_shipment
    UNION ALL SELECT 'letters', invoice FROM shop_letter
), reads (consumer_group, topic) AS (
    VALUES ('cart', 'orders'), ('points', 'orders'), ('points', 'order-cancellations'), ('shipment', 'orders'),
        ('letters', 'shipments')
), business (topic, invoice) AS (
    SELECT 'orders', invoice FROM shop_order
    UNION ALL SELECT 'order-cancellations', invoice FROM shop_cancellation
    UNION ALL SELECT 'shipments', invoice FROM shop_shipment
), message (id, topic, invoice) AS (
    SELECT m.id, t.name, m.key FROM outbox_message m JOIN outbox_topic t ON t.id = m.topic_id
)
"""

# Invoices with a missing effect, without their message, or whose message a group has not handled.
LOST = f"""
{LEDGERS}
SELECT count(*) FROM (
    SELECT invoice FROM (SELECT * FROM owed EXCEPT SELECT * FROM effect) missing
    UNION SELECT invoice FROM (SELECT * FROM business EXCEPT SELECT topic, invoice FROM message) missing
    UNION SELECT m.invoice FROM message m JOIN reads r USING (topic) WHERE NOT EXISTS (
        SELECT FROM outbox_inbox i WHERE i.consumer_group = r.consumer_group AND i.message_id = m.id
    )
) lost
"""  # noqa: S608

# Messages that a consumer could see or has handled, and effects, that belong to no committed message or business row.
GHOSTS = f"""
{LEDGERS}
SELECT count(*) FROM (
    SELECT key FROM demo_visible e WHERE NOT EXISTS (SELECT FROM message m WHERE m.id::text = e.message_id)
    UNION SELECT coalesce(e.key, i.message_id::text) FROM outbox_inbox i
        LEFT JOIN demo_visible e ON e.message_id = i.message_id::text
        WHERE NOT EXISTS (SELECT FROM message m WHERE m.id = i.message_id)
    UNION SELECT invoice FROM effect WHERE NOT EXISTS (SELECT FROM business b WHERE b.invoice = effect.invoice)
) ghosts
"""  # noqa: S608

APPLIED_TWICE = f"""
{LEDGERS}
SELECT coalesce(sum(times - 1), 0)::int
FROM (SELECT count(*) AS times FROM effect GROUP BY consumer_group, invoice) effects
"""  # noqa: S608

COUNTS = """
SELECT (SELECT count(*) FROM shop_order) AS orders,
    (SELECT count(*) FROM shop_cancellation) AS cancellations,
    (SELECT count(*) FROM shop_refusal WHERE what = 'line') AS refused_lines,
    (SELECT count(*) FROM shop_refusal WHERE what = 'payment') AS rolled_back,
    (SELECT count(*) FROM outbox_message) AS published,
    (SELECT count(*) FROM demo_half) AS half_messages,
    (SELECT count(*) - count(DISTINCT message_id) FROM demo_visible) AS duplicate_copies,
    (SELECT count(*) FROM outbox_inbox WHERE delivery_count > 1)
        + (SELECT count(*) FROM outbox_duplicate WHERE delivery_count > 1)
        + (SELECT count(*) FROM outbox_failed_delivery WHERE delivery_count > 1) AS redelivered,
    (SELECT count(*) FROM outbox_duplicate) AS duplicates_dropped
"""

# The answered check-backs that came in these ways.
CHECK_BACKS = """
SELECT count(*) FILTER (WHERE answer = 'COMMIT'), count(*) FILTER (WHERE answer = 'ROLLBACK'),
    count(*) FILTER (WHERE answer = 'UNKNOWN')
FROM outbox_check_back WHERE asked_by = ANY(%s)
"""

# The time from the publish, at the end of the order's transaction, to the end of the handler's transaction.
LATENCY = """
SELECT count(*), percentile_cont(ARRAY[0.5, 0.99]) WITHIN GROUP (ORDER BY extract(epoch FROM i.handled_at - m.created_at) * 1000)
FROM outbox_inbox i JOIN outbox_message m ON m.id = i.message_id
"""


@dataclass(frozen=True, slots=True)
class Kills:
    """
    The numbers of killed processes.

    Args:
        undecided: relays killed after they sent half messages and before the decision.
        unmarked: relays killed after the broker's confirms and before they marked the messages as sent.
        unacked: consumers killed after the handler's commit and before the ack.
    """

    long_running: int = 0
    celery: int = 0
    consumers: int = 0
    undecided: int = 0
    unmarked: int = 0
    unacked: int = 0

    @classmethod
    def count(cls, done: Iterable[tuple[Kill, int]]) -> Kills:
        kills = [kill for kill, _ in done]
        return cls(
            long_running=sum(kill.process == LONG_RUNNING for kill in kills),
            celery=sum(kill.process == CELERY for kill in kills),
            consumers=sum(not kill.is_of_relay for kill in kills),
            undecided=sum(kill.place == HALF_SENT for kill in kills),
            unmarked=sum(kill.place in (CONFIRMED, COMMITTED) for kill in kills),
            unacked=sum(kill.place == UNACKED for kill in kills),
        )

    @property
    def total(self) -> int:
        return self.long_running + self.celery + self.consumers


@dataclass(frozen=True, slots=True)
class Report:
    """
    The counts of the report: guarantees, and injected faults.

    Args:
        two_phase: whether the broker has half messages and sends check-backs.
        outage: the outage of the broker; None if the broker was not killed.
    """

    orders: int
    cancellations: int
    refused_lines: int
    rolled_back: int
    published: int
    half_messages: int
    duplicate_copies: int
    check_backs: dict[str, int]
    kills: Kills
    redelivered: int
    duplicates_dropped: int
    handled: int
    lost: int
    ghosts: int
    applied_twice: int
    p50_ms: float
    p99_ms: float
    two_phase: bool = True
    publishes_once: bool = False
    outage: Outage | None = None

    @property
    def is_kept(self) -> bool:
        copies = self.duplicate_copies if self.publishes_once else 0
        return self.lost == self.ghosts == self.applied_twice == copies == 0

    def missing(self) -> list[str]:
        """Return lines about the faults that the demo has to show and that did not happen often enough."""
        kills = self.kills
        wanted = [
            ("rolled back orders", self.rolled_back, 3),
            ("kills of relays", kills.long_running + kills.celery, 5),
            ("kills of the long-running relay", kills.long_running, 2),
            ("kills of Celery's relay", kills.celery, 2),
            ("kills of consumers before the ack", kills.unacked, 5),
            *(self._wanted_of_two_phases() if self.two_phase else self._wanted_of_one_phase()),
        ]
        return [f"{fault}: {found} instead of {minimum} or more" for fault, found, minimum in wanted if found < minimum]

    def _wanted_of_two_phases(self) -> list[tuple[str, int, int]]:
        asked = self.check_backs
        return [("check-backs answered COMMIT", asked["commit"], 3), ("check-backs answered ROLLBACK", asked["rollback"], 1)]

    def _wanted_of_one_phase(self) -> list[tuple[str, int, int]]:
        return [
            ("kills of relays between confirm and mark", self.kills.unmarked, 3),
            ("duplicate copies", self.duplicate_copies, 0 if self.publishes_once else 3),
            ("kills of the broker", int(self.outage is not None), 1),
            ("messages in queues of dead consumers when the broker was killed", self.outage.held if self.outage else 0, 1),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the report for `--json`, with the kills in total and by process."""
        return {**asdict(self), "kills": self.kills.total, "kills_by": asdict(self.kills)}


def read(
    connection: Connection, kills: Kills, doors: Sequence[str], outage: Outage | None = None, *, publishes_once: bool = False
) -> Report:
    """
    Count everything.

    Args:
        doors: the ways of check-backs, as in `asked_by`; empty if the broker has no half messages.
    """
    cursor = connection.execute(COUNTS)
    assert cursor.description is not None
    counts = dict(zip([column.name for column in cursor.description], cursor.fetchone() or (), strict=True))
    handled, latency = connection.execute(LATENCY).fetchone() or (0, None)
    p50, p99 = latency or (0.0, 0.0)
    answers = connection.execute(CHECK_BACKS, [list(doors)]).fetchone() or ()
    return Report(
        **counts,
        check_backs=dict(zip(("commit", "rollback", "unknown"), answers, strict=True)),
        kills=kills,
        handled=handled,
        lost=number(connection, LOST),
        ghosts=number(connection, GHOSTS),
        applied_twice=number(connection, APPLIED_TWICE),
        p50_ms=round(p50, 1),
        p99_ms=round(p99, 1),
        two_phase=bool(doors),
        publishes_once=publishes_once,
        outage=outage,
    )


def number(connection: Connection, statement: str) -> int:
    """Return the count that a query returns."""
    row = connection.execute(statement).fetchone()
    assert row is not None
    return int(row[0])
