"""
Partitions of the message table: one per UTC day, by the time in the first 48 bits of the ids (uuid7).

Partitions are created ahead, so that publishers never wait for one. A message of a day without a partition goes to the DEFAULT
partition, and `make_days` moves it later.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection
from datetime import UTC, date, datetime, timedelta
from typing import LiteralString, NamedTuple, TypeVar
from uuid import UUID

from psycopg import errors, sql

from outbox import signals
from outbox.database.connections import Connection, connect
from outbox.database.locks import END_IDLE_TRANSACTION, LOCK_PARTITIONS
from outbox.ids import day_at, day_of, first_id
from outbox.logs import get_logger

logger = get_logger(__name__)

T = TypeVar("T")

DAYS_AHEAD = 7  # partitions created in advance; maintenance may be interrupted that long

PATIENCE = timedelta(seconds=10)

# CheckViolation: a row of the day reached DEFAULT after it was checked.
RETRIED = (errors.LockNotAvailable, errors.DeadlockDetected, errors.CheckViolation)

# Other transactions queue behind a lock that waits.
WAIT_BRIEFLY = "SET LOCAL lock_timeout = '100ms'"

# Only the owner of a table, or a member of that role, may attach partitions to it and drop them; creating one needs CREATE, too.
RIGHTS = """
SELECT pg_has_role(c.relowner, 'USAGE'),
    pg_has_role(c.relowner, 'USAGE') AND has_schema_privilege(c.relnamespace, 'CREATE'),
    pg_get_userbyid(c.relowner), current_user
FROM pg_class c WHERE c.oid = 'outbox_message'::regclass
"""

LIST_DAYS = """
SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = 'outbox_message'::regclass AND c.relname <> 'outbox_message_default' ORDER BY c.relname
"""


# The CHECK constraint spares ATTACH a scan. CREATE .. PARTITION OF would block all publishers while it waits for an open
# transaction; ATTACH locks only the DEFAULT partition, which publishers rarely need.
CREATE_DAY = (
    "CREATE TABLE {day} (LIKE outbox_message INCLUDING DEFAULTS INCLUDING CONSTRAINTS)",
    "ALTER TABLE {day} ADD PRIMARY KEY (id), ADD CONSTRAINT is_of_its_day CHECK (id >= {first} AND id < {end})",
)
ATTACH_DAY = (
    "ALTER TABLE outbox_message ATTACH PARTITION {day} FOR VALUES FROM ({first}) TO ({end})",
    "ALTER TABLE {day} DROP CONSTRAINT is_of_its_day",
)

# No row may be written into DEFAULT while its rows of this day are moved.
LOCK_MESSAGES = "LOCK TABLE outbox_message IN ACCESS EXCLUSIVE MODE"
MOVE_STRAYS = """
WITH stray AS (DELETE FROM outbox_message_default WHERE id >= {first} AND id < {end} RETURNING *)
INSERT INTO {day} SELECT * FROM stray
"""

LOCK_DAY = "LOCK TABLE {day} IN ACCESS EXCLUSIVE MODE"
DROP_DAY = "DROP TABLE {day}"

# PostgreSQL has no min() of uuids before version 18.
FIND_STRAY = "SELECT id FROM outbox_message_default WHERE id >= %s ORDER BY id LIMIT 1"


class Rights(NamedTuple):
    """Whether a connection's role may drop and create partitions, the role that owns them, and its own."""

    may_drop: bool
    may_create: bool
    owner: str
    role: str


def rights(connection: Connection) -> Rights:
    """Return what a connection may do with the partitions."""
    [row] = connection.execute(RIGHTS).fetchall()
    return Rights(*row)


def lacks_tomorrow(found: Collection[date]) -> bool:
    """Return whether tomorrow has no partition, which means that no maintenance runs."""
    return day_at(datetime.now(UTC)) + timedelta(days=1) not in found


def table_of(day: date) -> str:
    """Return the name of a day's partition."""
    return f"outbox_message_{day:%Y%m%d}"


def days(connection: Connection) -> list[date]:
    """Return the days that have a partition, oldest first."""
    names = [name for (name,) in connection.execute(LIST_DAYS)]
    return [datetime.strptime(name[-8:], "%Y%m%d").replace(tzinfo=UTC).date() for name in names]


def make_days(using: str, *, today: date | None = None) -> list[date]:
    """
    Create the partitions of today and the coming days, and move rows out of the DEFAULT partition.

    A partition that cannot get its lock within `PATIENCE` is left for the next call, with a warning.

    Returns:
        The days whose partitions were created.
    """
    today = today or day_at(datetime.now(UTC))
    last = today + timedelta(days=DAYS_AHEAD)
    with connect(using, application_name="outbox maintenance") as connection:
        existing = set(days(connection))
        ahead = [today + timedelta(days=n) for n in range((last - today).days + 1)]
        strays = _stray_days(connection, last)
        wanted = sorted({*ahead, *(day for day in strays if day <= last)} - existing)
        if strays and existing:  # none: a migration has published, before there could be a day
            _send_alert(using, strays)
        return [day for day in wanted if make_day(connection, day)]


def make_day(connection: Connection, day: date) -> bool:
    """Create a day's partition and move its rows there from DEFAULT; return whether this call created it."""
    try:
        return with_short_locks(connection, lambda: _make_day(connection, day))
    except RETRIED:
        logger.warning("%s could not be created in %s: open transactions use the messages.", table_of(day), PATIENCE)
        return False


def drop_day(connection: Connection, day: date, *, unless: Callable[[], bool]) -> bool:
    """
    Drop a day's partition; return whether this call did.

    Args:
        unless: called when the partition is locked against writes; True keeps it.
    """

    def drop() -> bool:
        connection.execute(LOCK_PARTITIONS)
        if day not in days(connection):
            return False
        _run(connection, LOCK_DAY, day=day)
        if unless():
            return False
        _run(connection, DROP_DAY, day=day)
        return True

    try:
        return with_short_locks(connection, drop)
    except RETRIED:
        logger.warning("%s could not be dropped in %s: open transactions use the messages.", table_of(day), PATIENCE)
        return False


def with_short_locks(connection: Connection, step: Callable[[], T]) -> T:
    """
    Run a step in a transaction that waits at most 100 ms for a lock; repeat it until it succeeds or `PATIENCE` is over.

    Raises:
        psycopg.Error: one of RETRIED, after `PATIENCE`.
    """
    deadline = time.monotonic() + PATIENCE.total_seconds()
    while True:
        try:
            with connection.transaction():
                connection.execute(WAIT_BRIEFLY)
                connection.execute(END_IDLE_TRANSACTION)
                return step()
        except RETRIED:
            if time.monotonic() >= deadline:
                raise
            time.sleep(random.uniform(0.05, 0.2))  # noqa: S311  (so that transactions queued behind this one get through)


def _make_day(connection: Connection, day: date) -> bool:
    connection.execute(LOCK_PARTITIONS)
    if day in days(connection):
        return False
    stray = connection.execute(FIND_STRAY, [first_id(day)]).fetchone()
    has_strays = stray is not None and day_of(stray[0]) == day
    if has_strays:
        connection.execute(LOCK_MESSAGES)
    _run(connection, *CREATE_DAY, day=day)
    if has_strays:
        _run(connection, MOVE_STRAYS, day=day)
    _run(connection, *ATTACH_DAY, day=day)
    return True


def _run(connection: Connection, *statements: LiteralString, day: date) -> None:
    bounds = {"first": sql.Literal(first_id(day)), "end": sql.Literal(first_id(day + timedelta(days=1)))}
    for statement in statements:  # one by one, since a connection that prepares statements takes no two at once
        connection.execute(sql.SQL(statement).format(day=sql.Identifier(table_of(day)), **bounds))


def _stray_days(connection: Connection, last: date) -> list[date]:
    """Return the days of rows in DEFAULT: all up to `last`, and the first one after it."""
    dates: list[date] = []
    while not dates or dates[-1] <= last:
        after = first_id(dates[-1] + timedelta(days=1)) if dates else UUID(int=0)
        row = connection.execute(FIND_STRAY, [after]).fetchone()
        if row is None:
            break
        dates.append(day_of(row[0]))
    return dates


def _send_alert(using: str, strays: list[date]) -> None:
    reason = (
        f"Database {using!r} has messages in outbox_message_default, of {', '.join(map(str, strays))}. "
        "Check that the maintenance runs each hour, and that the clocks of the publishers are right."
    )
    logger.warning(reason)
    signals.alert.send_robust(sender=make_days, reason=reason, details={"database": using, "days": strays})
