"""Load the messages of claimed batches, in slices of limited size."""

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

# The messages of batches, from a position of the first batch on, until their bodies reach the limit; the first message even
# if it alone is larger. Message ids are read from the batches: sent as parameters they would cost more than the result. The
# sub-SELECT hides the number of batches from the planner, so that one plan serves any number. A message whose row is gone
# has NULLs. octet_length() does not read a body that is TOASTed.
ROWS = """
SELECT batch_id, position, key, headers, about, body FROM (
    SELECT given.n, batch.id AS batch_id, message_id.position, message.key, message.headers, message.about, message.body,
        sum(octet_length(message.body)) OVER in_order AS size, row_number() OVER in_order AS nth
    FROM unnest((SELECT %s::bigint[])) WITH ORDINALITY given(id, n)
    JOIN outbox_batch batch ON batch.id = given.id,
    unnest(batch.message_ids) WITH ORDINALITY message_id(id, position)
    LEFT JOIN outbox_message message ON message.id = message_id.id
    WHERE given.n > 1 OR message_id.position >= %s
    WINDOW in_order AS (ORDER BY given.n, message_id.position ROWS UNBOUNDED PRECEDING)) sized
WHERE nth = 1 OR coalesce(size, 0) <= %s
ORDER BY n, position
"""

Row: TypeAlias = tuple[int, int, str, str | None, str | None, bytes]
"""
A message: the id of its batch, its position, key, headers, about and body.

All but the first two are None where the message row is gone.
"""

_batch_id = itemgetter(0)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Messages of a batch, in order."""

    batch: Batch
    rows: Sequence[Row]


def slices(connection: Connection, batches: Sequence[Batch], *, slice_bytes: int) -> Iterator[list[Loaded]]:
    """
    Yield the messages of batches in order, slice by slice; reads those that the claim has not loaded.

    A batch whose row is gone yields nothing.

    Args:
        slice_bytes: the most bytes of bodies in a slice; a larger body is a slice of its own.
    """
    if all(batch.messages is not None for batch in batches):
        rows = [(batch.id, n, *message) for batch in batches for n, message in enumerate(batch.messages or (), 1)]
        if sum(len(body or b"") for *_, body in rows) <= slice_bytes:
            yield list(by_batch(rows, batches))
            return
    waiting, begin = list(batches), 1
    # Not connection.cursor(): in tests that is Django's, which cannot read bodies in binary format.
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
    """Group rows, sorted by batch, by their batches; leave out positions that were split off."""
    by_id = {batch.id: batch for batch in batches}
    for batch_id, group in groupby(rows, _batch_id):
        batch, found = by_id[batch_id], list(group)
        if batch.split:
            found = [row for row in found if row[1] not in batch.split]
        if found:
            yield Loaded(batch, found)
