"""How often a publish asks PostgreSQL: what a caller waits for, counted on the wire."""

from collections.abc import Callable

import pytest
from django.db import connection

from outbox import Envelope, publish, publish_many, publish_raw
from outbox.database import raw
from tests.outbox.publishing.rows import OrderMade, ParcelMoved

WARM = 10  # times, after which the topic's id is known and psycopg has prepared the statements

pytestmark = pytest.mark.usefixtures("in_transaction")


@pytest.fixture
def asked(tmp_path):
    """Return how often something asks the server, and how many statements Django logs of it, when done once more."""

    def count(action: Callable[[int], object]) -> tuple[int, int]:
        for nth in range(WARM):
            action(nth)
        statements = []
        with (tmp_path / "trace").open("w+b") as trace, connection.execute_wrapper(_note(statements)):
            raw("default").pgconn.trace(trace.fileno())
            action(WARM)
            raw("default").pgconn.untrace()
            trace.seek(0)
            return trace.read().count(b"ReadyForQuery"), len(statements)

    return count


def _note(statements):
    def wrapper(execute, sql, params, many, context):
        statements.append(sql)
        return execute(sql, params, many, context)

    return wrapper


@pytest.mark.parametrize(
    "action",
    [
        lambda nth: publish(OrderMade(order_id=nth)),
        lambda nth: publish_raw("made", b"%d" % nth),
        lambda nth: publish_many([OrderMade(order_id=nth), OrderMade(order_id=-nth)]),
    ],
    ids=["a publish", "a raw body", "many"],
)
def test_it_asks_once(asked, action):
    assert asked(action) == (1, 1)


@pytest.mark.parametrize(
    "action",
    [
        lambda nth: publish(ParcelMoved(parcel=f"parcel {nth}")),
        lambda nth: publish_many([OrderMade(order_id=nth), ParcelMoved(parcel=f"parcel {nth}")]),
        lambda nth: publish(OrderMade(order_id=nth), idempotency_key=f"order {nth}"),
        lambda nth: publish(OrderMade(order_id=nth), idempotency_key="the same"),
        lambda nth: publish_many([Envelope(OrderMade(order_id=nth), idempotency_key=f"order {nth}") for _ in range(2)]),
    ],
    ids=["an ordered topic", "many, one of an ordered topic", "an idempotency key", "one that is taken", "many with one key"],
)
def test_it_asks_twice_where_it_locks_an_order_key_or_takes_an_idempotency_key(asked, action):
    assert asked(action) == (2, 2)
