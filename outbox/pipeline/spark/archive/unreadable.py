"""Find values that cannot be archived: times outside of the supported range, and numbers that would overflow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.pipeline.spark.lake.frames import TIMED_FRAMES, Frame, Span
from outbox.pipeline.spark.sources.broken_rows import FIRST_TIME, HIGHEST, LAST_TIME

if TYPE_CHECKING:
    import psycopg

NAMED = 3  # the maximum number of values in the text

IS_BEYOND = f"({{value}} > '{LAST_TIME}' OR {{value}} < '{FIRST_TIME}')"

OF_MESSAGES = f"""
SELECT 'created_at of message ' || id || ' is ' || created_at FROM outbox_message
WHERE id >= %(first)s AND id < %(end)s AND {IS_BEYOND.format(value="created_at")}
UNION ALL
SELECT w.name || ' of batch ' || b.id || ' with message ' || b.message_ids[1] || ' is ' || w.value
FROM outbox_batch b CROSS JOIN LATERAL (
    SELECT name, value::text FROM (
        VALUES ('claimed_at', b.claimed_at), ('decided_at', b.decided_at), ('sent_at', b.sent_at)) t(name, value)
    WHERE {IS_BEYOND.format(value="value")}
    UNION ALL SELECT 'first number', b.first_seq::text WHERE b.first_seq NOT BETWEEN -{HIGHEST} AND {HIGHEST}) w(name, value)
WHERE outbox_newest(b.message_ids) >= %(first)s
    AND EXISTS (SELECT FROM unnest(b.message_ids) u(id) WHERE u.id >= %(first)s AND u.id < %(end)s)
"""


def find_unreadable(connection: psycopg.Connection[Any], span: Span) -> str | None:
    """Return a text about values of a day that cannot be archived. None: there are none."""
    query = " UNION ALL ".join([OF_MESSAGES, *(_of_frame(frame, span) for frame in TIMED_FRAMES.values())])
    rows = connection.execute(f"{query} LIMIT {NAMED}", {"first": span.first_id, "end": span.end_id}).fetchall()
    found = ", ".join(text for (text,) in rows)
    return f"{found}: this value cannot be archived. Correct it; the next run archives the day" if found else None


def _of_frame(frame: Frame, span: Span) -> str:
    message = next((column.sql for column in frame.columns if column.name == "message_id"), "''")
    times = [column.sql for column in frame.columns if column.kind == "time"]
    return " UNION ALL ".join(
        f"SELECT '{time} of message ' || coalesce({message}, '') || ' in outbox_{frame.name} is ' || {time} "
        f"FROM outbox_{frame.name} WHERE {frame.time} < '{span.end}' AND {IS_BEYOND.format(value=time)}"
        for time in times
    )
