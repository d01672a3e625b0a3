"""Loads what the messages of claimed batches say, no more of it at once than fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psycopg
from psycopg.rows import tuple_row

from outbox.batches.batch import Batch
from outbox.database import Connection

# The first messages of a list whose bodies fit together, the very first even if it alone does not. A message whose row
# is gone comes with NULLs. octet_length() reads no body that is stored apart.
ROWS = """
SELECT key, headers, about, body FROM (
    SELECT u.n, m.key, m.headers, m.about, m.body, sum(octet_length(m.body)) OVER (ORDER BY u.n) AS size
    FROM unnest(%s::uuid[]) WITH ORDINALITY u(id, n) LEFT JOIN outbox_message m ON m.id = u.id) s
WHERE n = 1 OR coalesce(size, 0) <= %s
ORDER BY n
"""


@dataclass(frozen=True, slots=True)
class Row:
    """What a message row says, beside its id."""

    key: str
    headers: str
    about: str | None
    body: bytes


@dataclass(frozen=True, slots=True)
class Loaded:
    """A message of a batch. `row` is None where the message row is gone."""

    batch: Batch
    position: int
    row: Row | None


def slices(connection: Connection, batches: Sequence[Batch], *, slice_bytes: int) -> Iterator[list[Loaded]]:
    """
    Load the messages of batches, in order.

    Args:
        slice_bytes: the bodies of one slice are together no larger, unless a single one is.
    """
    waiting = [(batch, position) for batch in batches for position in batch.positions]
    # A class of its own: Django's cursors, which a test may hand in, cannot read bodies in binary.
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        while waiting:
            ids = [batch.message_ids[position - 1] for batch, position in waiting]
            rows = cursor.execute(ROWS, [ids, slice_bytes], binary=True).fetchall()
            yield [
                Loaded(batch, position, None if row[0] is None else Row(*row))
                for (batch, position), row in zip(waiting, rows, strict=False)
            ]
            waiting = waiting[len(rows) :]
