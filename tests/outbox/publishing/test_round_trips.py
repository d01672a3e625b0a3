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


class TestAPublish:
    def test_asks_once(self, asked):
        found = asked(lambda nth: publish(OrderMade(order_id=nth)))

        assert found == (1, 1)

    def test_asks_once_for_a_raw_body(self, asked):
        found = asked(lambda nth: publish_raw("made", b"%d" % nth))

        assert found == (1, 1)

    def test_asks_twice_in_an_ordered_topic_whose_key_it_locks(self, asked):
        found = asked(lambda nth: publish(ParcelMoved(parcel=f"parcel {nth}")))

        assert found == (2, 2)

    def test_asks_twice_with_a_idempotency_key(self, asked):
        found = asked(lambda nth: publish(OrderMade(order_id=nth), idempotency_key=f"order {nth}"))

        assert found == (2, 2)

    def test_asks_twice_with_a_idempotency_key_that_is_taken(self, asked):
        found = asked(lambda nth: publish(OrderMade(order_id=nth), idempotency_key="the same"))

        assert found == (2, 2)


class TestPublishingMany:
    def test_asks_once(self, asked):
        found = asked(lambda nth: publish_many([OrderMade(order_id=nth), OrderMade(order_id=-nth)]))

        assert found == (1, 1)

    def test_asks_twice_with_idempotency_keys(self, asked):
        found = asked(
            lambda nth: publish_many([Envelope(OrderMade(order_id=nth), idempotency_key=f"order {nth}") for _ in range(2)])
        )

        assert found == (2, 2)

    def test_asks_twice_where_a_topic_is_ordered(self, asked):
        found = asked(lambda nth: publish_many([OrderMade(order_id=nth), ParcelMoved(parcel=f"parcel {nth}")]))

        assert found == (2, 2)
