"""Loads what the messages of claimed batches say, no more of it at once than fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TypeAlias

import psycopg
from psycopg.rows import tuple_row

from outbox.batches.batch import Batch
from outbox.database import Connection

# The messages of batches, from a position of the first one on: as many as have bodies that fit together, the very first even
# if it alone does not. The server reads the ids where it has them: as an array in the question they cost more than the
# answer. Behind a SELECT, the list of batches has no length that the planner knows, so that it plans once for all lengths.
# A message whose row is gone comes with NULLs. octet_length() reads no body that is stored apart.
ROWS = """
SELECT batch_id, position, key, headers, about, body FROM (
    SELECT g.n, b.id AS batch_id, u.position, m.key, m.headers, m.about, m.body,
        sum(octet_length(m.body)) OVER in_order AS size, row_number() OVER in_order AS nth
    FROM unnest((SELECT %s::bigint[])) WITH ORDINALITY g(id, n)
    JOIN outbox_batch b ON b.id = g.id,
    unnest(b.message_ids) WITH ORDINALITY u(id, position)
    LEFT JOIN outbox_message m ON m.id = u.id
    WHERE g.n > 1 OR u.position >= %s
    WINDOW in_order AS (ORDER BY g.n, u.position ROWS UNBOUNDED PRECEDING)) s
WHERE nth = 1 OR coalesce(size, 0) <= %s
ORDER BY n, position
"""

Row: TypeAlias = tuple[int, int, str, str | None, str | None, bytes]
"""
A message: the id of its batch, the position there, key, headers, about and body.

Headers are None where its message row is gone, and then no more is known of it.
"""

_batch_id = itemgetter(0)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Messages of a batch, in order."""

    batch: Batch
    rows: Sequence[Row]


def slices(connection: Connection, batches: Sequence[Batch], *, slice_bytes: int) -> Iterator[list[Loaded]]:
    """
    Load the messages of batches, in order, as far as they did not come along with the claim.

    A batch whose row is gone, which is nobody's any more, has none.

    Args:
        slice_bytes: the bodies of one slice are together no larger, unless a single one is.
    """
    if all(batch.messages is not None for batch in batches):
        along = [(batch.id, n, *row) for batch in batches for n, row in enumerate(batch.messages or (), 1)]
        if sum(len(body or b"") for *_, body in along) <= slice_bytes:
            yield list(by_batch(along, batches))
            return
    waiting, begin = list(batches), 1
    # A class of its own: Django's cursors, which a test may hand in, cannot read bodies in binary.
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        while waiting:
            arguments = [[batch.id for batch in waiting], begin, slice_bytes]
            rows = cursor.execute(ROWS, arguments, binary=True).fetchall()
            if not rows:
                return
            if loaded := list(by_batch(rows, waiting)):
                yield loaded
            last_id, last_position, *_ = rows[-1]
            while waiting[0].id != last_id:
                waiting.pop(0)
            begin = last_position + 1
            if last_position == len(waiting[0].message_ids):
                waiting, begin = waiting[1:], 1


def by_batch(rows: Iterable[Row], batches: Iterable[Batch]) -> Iterator[Loaded]:
    """Put rows that come batch by batch to their batches, without the positions that were split off."""
    by_id = {batch.id: batch for batch in batches}
    for batch_id, group in groupby(rows, _batch_id):
        batch, found = by_id[batch_id], list(group)
        if batch.split:
            found = [row for row in found if row[1] not in batch.split]
        if found:
            yield Loaded(batch, found)
