"""
Compare what should be with what is: orders, outbox, broker, inbox and effects. The framework's own counters are not asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from outbox.models import State
from tests.explorer.brokers import order_of

UNFINISHED = f"""
SELECT 'ticket' FROM outbox_ticket UNION ALL SELECT 'delayed' FROM outbox_delayed
UNION ALL SELECT 'deferred: ' || reason || ' ' || error FROM outbox_deferred
UNION ALL SELECT 'batch in state ' || state FROM outbox_batch WHERE state NOT IN ({State.SENT}, {State.DISCARDED})
"""


@dataclass(frozen=True, slots=True)
class Placed:
    """An order that was committed. `place`: the place in the order of commits, among those of its key."""

    number: int
    topic: str
    key: str
    place: int


@dataclass(frozen=True, slots=True)
class Found:
    """What there is after a schedule. `copies` and `effects`: numbers of orders, in the order in which they were stored."""

    orders: list[Placed]
    unfinished: list[str]
    copies: list[int]
    inbox: int
    effects: list[int]


def read(connection: psycopg.Connection[Any], copies: Sequence[bytes]) -> Found:
    """Read what there is. `copies`: the bodies of visible messages, in the broker's order."""
    orders = connection.execute("SELECT number, topic, key, place FROM explorer_order ORDER BY place").fetchall()
    return Found(
        [Placed(*row) for row in orders],
        [row[0] for row in connection.execute(UNFINISHED).fetchall()],
        [order_of(body) for body in copies],
        connection.execute("SELECT count(*) FROM outbox_inbox").fetchall()[0][0],
        [row[0] for row in connection.execute("SELECT number FROM explorer_effect ORDER BY id").fetchall()],
    )


def problems(found: Found, *, once: frozenset[str]) -> list[str]:
    """
    Return what is wrong, each beginning with its kind. `once`: the topics whose messages the broker must have exactly once.
    """
    copies, effects = Counter(found.copies), Counter(found.effects)
    numbers = {order.number for order in found.orders}
    wrong = [f"lost: order {n} was committed, its message was never sent" for n in sorted(numbers - copies.keys())]
    wrong += [f"ghost: the message of order {n}, which was not committed, was sent" for n in sorted(copies.keys() - numbers)]
    wrong += [
        f"double: the message of order {order.number} was sent {copies[order.number]} times"
        for order in found.orders
        if order.topic in once and copies[order.number] > 1
    ]
    wrong += [f"unhandled: order {n} has no effect" for n in sorted((numbers & copies.keys()) - effects.keys())]
    wrong += [f"handled twice: order {n} has {times} effects" for n, times in sorted(effects.items()) if times > 1]
    if not wrong and found.inbox != len(effects):
        wrong.append(f"inbox: {found.inbox} rows for {len(effects)} effects")
    wrong += [f"unfinished: {what}" for what in sorted(set(found.unfinished))]
    for what, stored in (("sent", found.copies), ("handled", found.effects)):
        wrong += _out_of_order(found.orders, what, list(dict.fromkeys(stored)))
    return wrong


def _out_of_order(orders: Sequence[Placed], what: str, stored: Sequence[int]) -> list[str]:
    by_key: dict[str, list[int]] = {}
    for order in orders:
        if order.topic == "keyed" and order.number in stored:
            by_key.setdefault(order.key, []).append(order.number)
    return [
        f"order: of key {key}, {found} were {what} instead of {numbers}"
        for key, numbers in sorted(by_key.items())
        if (found := [n for n in stored if n in numbers]) != numbers
    ]
