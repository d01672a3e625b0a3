"""
Daily partitions of the message table: one per UTC day, by the time in the first 48 bits of the ids (uuid7).

Partitions are created in advance, so that publishers never wait for one. A message of a day without a partition (a stray) goes
to the DEFAULT partition, and `create_partitions` moves it later.
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
from outbox.database.retention_holds import FROM_DAYS
from outbox.ids import day_at, day_of, first_id
from outbox.logs import get_logger, line_of

logger = get_logger(__name__)

T = TypeVar("T")

DAYS_AHEAD = 7  # the number of partitions created in advance, and so the days for which maintenance may be interrupted

PATIENCE = timedelta(seconds=10)

# Errors after which a transaction is repeated. CheckViolation: a row of the day was written to the DEFAULT partition after that
# partition was searched for rows of the day.
RETRIED = (errors.LockNotAvailable, errors.DeadlockDetected, errors.CheckViolation)

# The wait for a lock is short, because other transactions queue behind a statement that waits for one.
WAIT_BRIEFLY = "SET LOCAL lock_timeout = '100ms'"

# Only the table's owner, or a member of that role, may attach and drop partitions; creating one also needs CREATE on the schema.
RIGHTS = """
SELECT pg_has_role(c.relowner, 'USAGE'),
    pg_has_role(c.relowner, 'USAGE') AND has_schema_privilege(c.relnamespace, 'CREATE'),
    pg_get_userbyid(c.relowner), current_user
FROM pg_class c WHERE c.oid = 'outbox_message'::regclass
"""

LIST_DAYS: LiteralString = f"SELECT c.relname {FROM_DAYS} ORDER BY c.relname"

# The schema of the table, which need not be the first one of the search_path.
SCHEMA = "SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = 'outbox_message'::regclass"

# The CHECK constraint spares ATTACH a scan of the new partition. CREATE .. PARTITION OF would block all publishers while it
# waits for an open transaction; ATTACH locks only the DEFAULT partition, which publishers rarely need.
CREATE_DAY = (
    "CREATE TABLE {schema}.{day} (LIKE outbox_message INCLUDING DEFAULTS INCLUDING CONSTRAINTS)",
    "ALTER TABLE {day} ADD PRIMARY KEY (id), ADD CONSTRAINT is_of_its_day CHECK (id >= {first} AND id < {end})",
)
ATTACH_DAY = (
    "ALTER TABLE outbox_message ATTACH PARTITION {day} FOR VALUES FROM ({first}) TO ({end})",
    "ALTER TABLE {day} DROP CONSTRAINT is_of_its_day",
)

# No row must be written into DEFAULT while the rows of a day are moved out of it.
LOCK_MESSAGES = "LOCK TABLE outbox_message IN ACCESS EXCLUSIVE MODE"
MOVE_STRAYS = """
WITH stray AS (DELETE FROM outbox_message_default WHERE id >= {first} AND id < {end} RETURNING *)
INSERT INTO {day} SELECT * FROM stray
"""

LOCK_DAY = "LOCK TABLE {day} IN ACCESS EXCLUSIVE MODE"
DROP_DAY = "DROP TABLE {day}"

# ORDER BY and LIMIT replace min(), which PostgreSQL has for uuids only from version 18 on.
FIND_STRAY = "SELECT id FROM outbox_message_default WHERE id >= %s ORDER BY id LIMIT 1"


class Rights(NamedTuple):
    """Whether a connection's role may drop and create partitions; the `owner` of the message table; the connection's `role`."""

    may_drop: bool
    may_create: bool
    owner: str
    role: str


def rights(connection: Connection) -> Rights:
    """Return whether a connection's role may drop and create partitions."""
    [row] = connection.execute(RIGHTS).fetchall()
    return Rights(*row)


def lacks_tomorrow(existing: Collection[date]) -> bool:
    """Return whether tomorrow has no partition, which means that no maintenance runs. `existing`: the days that have one."""
    return day_at(datetime.now(UTC)) + timedelta(days=1) not in existing


def table_of(day: date) -> str:
    """Return the name of a day's partition."""
    return f"outbox_message_{day:%Y%m%d}"


def days(connection: Connection) -> list[date]:
    """Return the days that have a partition of ours, oldest first."""
    names = [name for (name,) in connection.execute(LIST_DAYS)]
    return [datetime.strptime(name[-8:], "%Y%m%d").replace(tzinfo=UTC).date() for name in names]


def create_partitions(using: str, *, today: date | None = None) -> list[date]:
    """
    Create the partitions of today and the coming days, and move rows out of the DEFAULT partition.

    If a lock is not available within `PATIENCE`, the partition is left for the next call, and a warning is logged.

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
        if strays and existing:  # without any partition, these are messages that a migration has published too early
            _send_alert(using, strays)
        return [day for day in wanted if create_partition(connection, day)]


def create_partition(connection: Connection, day: date) -> bool:
    """Create a day's partition and move its rows there from DEFAULT; return whether this call created it."""
    try:
        return with_short_locks(connection, lambda: _make_day(connection, day))
    except (errors.InvalidObjectDefinition, errors.DuplicateTable) as error:
        logger.warning(
            "The partition %s is not created, because an operator's table is in its place: %s. The maintenance neither fills nor "
            "drops that table.",
            *(table_of(day), line_of(error)),
        )
        return False
    except RETRIED:
        logger.warning(
            "The partition %s could not be created within %s, because open transactions use the message table. The next run of "
            "the maintenance tries again.",
            *(table_of(day), PATIENCE),
        )
        return False


def drop_partition(connection: Connection, day: date, *, unless: Callable[[], bool]) -> bool:
    """
    Drop a day's partition; return whether this call did.

    Args:
        unless: called after the partition was locked against writes; if it returns True, the partition is kept.
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
        logger.warning(
            "The partition %s could not be dropped within %s, because open transactions use it. The next run of the maintenance "
            "tries again.",
            *(table_of(day), PATIENCE),
        )
        return False


def with_short_locks(connection: Connection, action: Callable[[], T]) -> T:
    """
    Run a function in a transaction that waits at most 100 ms for a lock; repeat this until it succeeds or `PATIENCE` is over.

    Raises:
        psycopg.Error: one of RETRIED, if it did not succeed within `PATIENCE`.
    """
    deadline = time.monotonic() + PATIENCE.total_seconds()
    while True:
        try:
            with connection.transaction():
                connection.execute(WAIT_BRIEFLY)
                connection.execute(END_IDLE_TRANSACTION)
                return action()
        except RETRIED:
            if time.monotonic() >= deadline:
                raise
            time.sleep(random.uniform(0.05, 0.2))  # noqa: S311  (transactions that queue behind this one get their locks meanwhile)


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
    [[schema]] = connection.execute(SCHEMA).fetchall()
    names = {"schema": sql.Identifier(schema), "day": sql.Identifier(table_of(day))}
    bounds = {"first": sql.Literal(first_id(day)), "end": sql.Literal(first_id(day + timedelta(days=1)))}
    for statement in statements:  # one at a time, because a prepared statement cannot contain several
        connection.execute(sql.SQL(statement).format(**names, **bounds))


def _stray_days(connection: Connection, last: date) -> list[date]:
    """Return the days of which DEFAULT has rows: all days up to `last`, and the first one after it."""
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
        f"Database {using!r} has messages of {', '.join(map(str, strays))} in outbox_message_default, because these days had no "
        "partition. Check that the maintenance runs each hour, and that the clocks of the publishers are right."
    )
    logger.warning(reason)
    signals.alert.send_robust(sender=create_partitions, reason=reason, details={"database": using, "days": strays})
