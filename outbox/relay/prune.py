"""
Prune a database: drop the partitions of whole days of messages, and delete other rows in slices, in autocommit.

One process at a time prunes a database. Unfinished work is kept, however old: a day with a ticket, a delayed row, an
unfinished batch, or a dead batch whose messages have no copy; and an inbox row whose message may be delivered again
(`prune_inbox.py`).

An app may hold days back (`RetentionHold`), as the archive does. Then that app drops the days, and deletes the rows that
belong to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from uuid import UUID

import psycopg

from outbox import conf, database, signals
from outbox.batches.prune import prune as prune_batches
from outbox.conf.apps import PIPELINE, add_app, is_pipeline_missing
from outbox.database import Connection, partitions, retention_holds
from outbox.database.locks import END_IDLE_SESSION, Lock
from outbox.database.retention_holds import RetentionHold, find_holder
from outbox.errors import ConfigurationError
from outbox.ids import first_id
from outbox.logs import get_logger, log_fields
from outbox.models import UNFINISHED, State
from outbox.relay.prune_inbox import prune_inbox

logger = get_logger(__name__)

SLICE = 1000
INBOX = "outbox_inbox"
NOT_LOCKED = "open transactions"  # the next prune will find the day free
OF_OTHERS = "another role, which owns the tables and has to run outbox_maintenance"
OTHERS_GRACE = timedelta(days=2)  # so long after its retention may a day be kept by that role

# One process prunes at a time; a second one has nothing to do.
TRY_LOCK = f"SELECT pg_try_advisory_lock({Lock.PRUNE}, 0)"

# Records past their retention are deleted in slices, by index. The copy of a dead message is kept while the message is dead,
# or sent again.
DELETE_FROM = "DELETE FROM {table} WHERE ctid = ANY(ARRAY(SELECT ctid FROM {table} WHERE {old} LIMIT %(limit)s))"
OLD = {
    "outbox_delivery": "failed_at < %(before)s",
    "outbox_duplicate": "dropped_at < %(before)s",
    "outbox_tries": "changed_at < %(before)s",
    "outbox_check_back": "answered_at < %(before)s",
    "outbox_attempt": "failed_at < %(before)s",
    "outbox_gap": "closed_at < %(before)s",
    "outbox_dedupe": "expires_at < %(now)s",
    "outbox_dead": f"""
        died_at < %(before)s AND NOT EXISTS (
            SELECT FROM outbox_batch b
            WHERE (b.state IN {UNFINISHED} OR b.state = {State.DEAD}) AND outbox_dead.message_id = ANY(b.message_ids))""",
}

# The time from which brokers keep all messages: the first decision whose half messages have no confirmed end, or now.
KEEP_SINCE = f"SELECT least(min(decided_at), clock_timestamp()) FROM outbox_batch WHERE state = {State.PREPARED}"

CLOCK_DIFFERENCE = timedelta(minutes=1)  # the largest expected between a broker and the database that wrote the decision

IS_THERE = "SELECT to_regclass(%s) IS NOT NULL"

_old_of_apps: dict[str, str] = {}


def register_table(table: str, old: str) -> None:
    """
    Prune a table of an app, too, in databases that have it.

    Args:
        old: the SQL condition of rows past their retention; it may use `%(before)s`.
    """
    _old_of_apps[table] = old


@dataclass(slots=True)
class Pruned:
    """
    The result of a prune.

    Args:
        days: the days that were dropped, oldest first.
        kept: day past its retention that was kept -> what holds it.
        rows: table -> number of rows deleted.
    """

    days: list[date] = field(default_factory=list)
    kept: dict[date, str] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        """Return the result as a dict that can be encoded as JSON."""
        return asdict(self) | {"days": [str(day) for day in self.days], "kept": {str(k): v for k, v in self.kept.items()}}


def prune(using: str, *, now: datetime | None = None, patience: timedelta = partitions.PATIENCE) -> Pruned:
    """
    Drop days and delete rows that are past `OUTBOX["RETENTION"]`.

    A day is past its retention when all of it is; rows that belong to its messages are deleted with it. An app that holds days
    back may keep them longer, and drops them itself. A role that does not own the tables deletes rows only.

    Args:
        patience: how long to try for the lock that dropping one day needs.

    Raises:
        ConfigurationError: settings configure the pipeline, whose app is not installed.
    """
    _require_apps()
    now = now or datetime.now(UTC)
    holds = retention_holds.active()
    last_kept = (now - max([conf.settings().retention, *holds.values()])).astimezone(UTC).date()
    midnight = datetime.combine(last_kept, time.min, tzinfo=UTC)
    pruned = Pruned()
    with database.connect_session(using, application_name="outbox maintenance", patience=partitions.PATIENCE) as connection:
        connection.execute(END_IDLE_SESSION)
        if connection.execute(TRY_LOCK).fetchone() != (True,):
            return pruned
        may_drop = partitions.rights(connection).may_drop  # without the right, no lock is taken
        for day in partitions.days(connection):
            if day < last_kept:
                if may_drop:
                    _prune_day(connection, day, pruned, patience, holds)
                else:
                    pruned.kept[day] = OF_OTHERS
        free_by = {hold.reason: last_kept - hold.grace for hold in holds}
        _alert_held(using, pruned, free_by | {OF_OTHERS: last_kept - OTHERS_GRACE})
        pruned.rows["outbox_batch"] = prune_batches(
            connection, before=midnight, kept=[_bounds(day) for day in [*pruned.kept, last_kept]]
        )
        taken = {table for hold in holds for table in hold.tables}
        if INBOX not in taken:
            pruned.rows[INBOX] = prune_inbox(connection, before=midnight)
        there = {table: old for table, old in _old_of_apps.items() if connection.execute(IS_THERE, [table]).fetchone() == (True,)}
        for table, old in (OLD | there).items():
            if table not in taken:
                pruned.rows[table] = _delete_rows(connection, table, old, before=midnight, now=now)
    return pruned


def overdue(days: Iterable[date]) -> list[date]:
    """Return the days that should have been dropped by now, by whichever role or app drops them."""
    holds = retention_holds.active()
    kept_for = max([conf.settings().retention, *holds.values()]) + max([OTHERS_GRACE, *(hold.grace for hold in holds)])
    first = (datetime.now(UTC) - kept_for).date()
    return [day for day in days if day < first]


def read_keep_since() -> datetime | None:
    """
    Return the time from which brokers keep their messages, because ends of newer half messages may not be confirmed yet.

    A half message whose end had no answer is looked up at its broker, and sent again where the broker does not have it. So a
    broker must not prune it before. All databases of the settings are read: each may have sent to each broker.

    Returns:
        None where a database cannot be read: then the time is unknown, and no broker may prune.
    """
    found = []
    for alias in database.outbox_databases():
        try:
            with database.connect(alias, application_name="outbox maintenance") as connection:
                row = connection.execute(KEEP_SINCE).fetchone()
        except psycopg.errors.UndefinedTable:  # no outbox there, so it has sent nothing
            continue
        except psycopg.Error as error:
            logger.warning(
                "Brokers are not pruned now: unconfirmed ends are unknown, because database %r cannot be read. %s",
                *(alias, error),
                extra=log_fields(database=alias),
            )
            return None
        assert row is not None
        found.append(row[0])
    return min(found, default=datetime.now(UTC)) - CLOCK_DIFFERENCE


def _require_apps() -> None:
    """Raise an error where settings configure the pipeline, which may hold days back, and its app is not installed."""
    if is_pipeline_missing(conf.settings()):
        raise ConfigurationError(
            f'OUTBOX["PIPELINE"] is set, but its app is not installed: nothing is pruned, since the app might have to archive it '
            f"first. {add_app(PIPELINE)} Or remove the setting."
        )


def _prune_day(connection: Connection, day: date, pruned: Pruned, patience: timedelta, holds: Iterable[RetentionHold]) -> None:
    def is_held() -> bool:
        holder = find_holder(connection, *_bounds(day)) or next((hold.reason for hold in holds), None)
        if holder is not None:
            pruned.kept[day] = holder
        return holder is not None

    # Before any lock is taken, so that a day that is held blocks no other transaction, not even briefly.
    if is_held():
        return
    try:
        is_dropped = partitions.drop_day(connection, day, unless=is_held, patience=patience)
    except psycopg.errors.InsufficientPrivilege:  # a partition that another role has created
        pruned.kept[day] = OF_OTHERS
        return
    if is_dropped:
        pruned.days.append(day)
    else:
        pruned.kept.setdefault(day, NOT_LOCKED)


def _delete_rows(connection: Connection, table: str, old: str, *, before: datetime, now: datetime) -> int:
    statement = DELETE_FROM.format(table=table, old=old)
    deleted = 0
    while True:
        count = connection.execute(statement.encode(), {"before": before, "now": now, "limit": SLICE}).rowcount
        deleted += count
        if count < SLICE:
            return deleted


def _bounds(day: date) -> tuple[UUID, UUID]:
    return first_id(day), first_id(day + timedelta(days=1))


def _alert_held(using: str, pruned: Pruned, free_by: Mapping[str, date]) -> None:
    """
    Alert to days that are kept past their retention.

    Args:
        free_by: reason of a hold -> the first day that it may still keep.
    """

    def is_harmless(day: date, holder: str) -> bool:
        return holder == NOT_LOCKED or (holder in free_by and day >= free_by[holder])

    held = {day: holder for day, holder in pruned.kept.items() if not is_harmless(day, holder)}
    if not held:
        return
    days = ", ".join(f"{day} by {holder}" for day, holder in held.items())
    reason = f"Database {using!r} keeps days of messages past their retention: {days}. See manage.py outbox_status."
    logger.warning(reason, extra=log_fields(database=using))
    signals.alert.send_robust(sender=prune, reason=reason, details={"database": using, "kept": held})
