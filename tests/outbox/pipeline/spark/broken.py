"""Ways in which a played history can be broken: by hand, by a restore in part, by another program."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from django.db import connection

from tests.outbox.pipeline.stories import handle, relay


def run(statement: str, arguments: Sequence[Any] = ()) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement, arguments)


def play(batches: int = 1) -> None:
    """Publish batches of five orders, relay them and have every group handle them."""
    for _ in range(batches):
        relay(5)
    for group in ("cart", "points", "shipment"):
        handle(group)


# What is broken -> statements that break it, and the finding that names it.
SECOND, THIRD = (f"(SELECT message_id FROM outbox_inbox WHERE number = {number} LIMIT 1)" for number in (2, 3))
OF_BATCH = "WHERE id = (SELECT id FROM outbox_batch ORDER BY id OFFSET {} LIMIT 1)"
BROKEN: dict[str, tuple[list[str], str]] = {
    "a topic row that is gone": (
        ["DELETE FROM outbox_topic WHERE name = 'orders'"],
        r"unknown topic: 5 x topic '#.*whose row in outbox_topic is missing",
    ),
    "a batch without a lane": (
        [f"UPDATE outbox_batch SET lane = NULL {OF_BATCH.format(0)}"],
        r"broken row: .*has numbers, but no lane",
    ),
    "a batch without numbers": (
        [f"UPDATE outbox_batch SET first_seq = NULL {OF_BATCH.format(1)}"],
        r"broken row: .*has a lane, but no numbers",
    ),
    "headers that are not JSON": (
        [f"UPDATE outbox_message SET headers = 'not JSON' WHERE id = {SECOND}"],
        r"broken row: 1 x topic 'orders', at outbox.*headers are not a JSON object of strings",
    ),
    "headers that JSON allows and PostgreSQL does not": (
        [f'UPDATE outbox_message SET headers = \'{{"ce-type": "a\\u0000b"}}\' WHERE id = {SECOND}'],
        r"broken row: 1 x topic 'orders', at outbox.*headers are not a JSON object of strings",
    ),
    "headers at the broker that are cut": (
        [f"UPDATE outbox_embedded_message SET headers = left(headers, 20) WHERE message_id = {SECOND}::text"],
        r"broken row: 1 x topic 'orders', at broker.*headers are not a JSON object of strings",
    ),
    "a number that is a text": (
        [
            'UPDATE outbox_embedded_message SET headers = (headers::jsonb || \'{"ce-number": "two"}\')::text '
            f"WHERE message_id = {SECOND}::text"
        ],
        r"broken row: 1 x topic 'orders', at broker.*ce-lane and ce-number are not numbers",
    ),
    "a number that no integer holds": (
        [
            'UPDATE outbox_embedded_message SET headers = (headers::jsonb || \'{"ce-number": "99999999999999999999"}\')::text '
            f"WHERE message_id = {THIRD}::text"
        ],
        r"broken row: 1 x topic 'orders', at broker.*ce-lane and ce-number are not numbers",
    ),
    "a negative number": (
        ["UPDATE outbox_inbox SET number = -7 WHERE number = 2 AND consumer_group = 'cart'"],
        r"no number: 1 x topic 'orders'.*at inbox",
    ),
    "the highest number there is": (
        [f"UPDATE outbox_batch SET first_seq = 9223372036854775807 {OF_BATCH.format(2)}"],
        r"broken row: .*first_seq of batch ",
    ),
    "a lane that has given out all numbers": (
        ["UPDATE outbox_lane SET last_seq = -9223372036854775808"],
        r"beyond the last number: .*at outbox",
    ),
    "a batch whose arrays have different lengths": (
        ["UPDATE outbox_batch SET half_ids = ARRAY['a', 'b', 'c', 'd', 'e', 'f', 'g']"],
        r"broken row: .*has 7 half_ids for ",
    ),
    "a batch that lost a position it never had": (
        ["UPDATE outbox_batch SET split = ARRAY[77]::smallint[]"],
        r"broken row: .*refers to a position that it does not have",
    ),
    "a state that there is not": (
        [f"UPDATE outbox_batch SET state = 9 {OF_BATCH.format(3)}"],
        r"broken row: .*has state 9, which does not exist",
    ),
    "times that never end": (
        ["UPDATE outbox_inbox SET handled_at = 'infinity' WHERE number = 2"],
        r"broken row: 3 x topic 'orders', at inbox.*handled_at is before 1970 or after 9998",
    ),
    "times beyond the calendar": (
        ["UPDATE outbox_batch SET sent_at = '20000-01-01', claimed_at = '20000-01-01'"],
        r"(broken row: .*is before 1970 or after 9998|clock: .*at outbox)",
    ),
    "times before the calendar": (
        [
            f"UPDATE outbox_message SET created_at = '-infinity' WHERE id = {SECOND}",
            "UPDATE outbox_inbox SET handled_at = '-infinity' WHERE number = 3",
        ],
        r"broken row: 3 x topic 'orders', at inbox.*handled_at is before 1970 or after 9998",
    ),
    "times far ahead": (
        ["UPDATE outbox_inbox SET handled_at = '2999-01-01' WHERE number = 3"],
        r"clock: .*at inbox of group",
    ),
    "everything gone but the lanes": (
        [
            f"DELETE FROM {table}"
            for table in (
                "outbox_batch",
                "outbox_message",
                "outbox_inbox",
                "outbox_embedded_message",
                "outbox_embedded_offset",
                "outbox_failed_delivery",
                "outbox_deferred",
                "outbox_operator_act",
                "outbox_ticket",
                "outbox_dead",
            )
        ],
        r"lost: 5 x topic 'orders', lane 1, numbers 1 to 5, at outbox",
    ),
}


@contextmanager
def installed_long_ago() -> Iterator[None]:
    """Have the outbox be there for longer than it keeps messages: what is not there may have been pruned."""
    move = "UPDATE django_migrations SET applied = applied {sign} interval '30 days' WHERE app = 'outbox'"
    run(move.format(sign="-"))
    try:
        yield
    finally:
        run(move.format(sign="+"))
