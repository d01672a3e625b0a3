"""
Pruning: whole days of messages are dropped, everything else is deleted in bounded slices, in autocommit.

Never in the relay's transaction; one pruner at a time per database. What is unfinished stays, however old: a day with a
ticket, a delayed row, an unfinished batch, or a dead one whose messages have no copy. So does an inbox row whose message may come
again (`prune_inbox.py`).

An app may hold days back (`RetentionHold`), as the archive does: then it drops them, and deletes the rows it takes along.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from uuid import UUID

import psycopg

from outbox import conf, database, signals
from outbox.batches.batch import UNFINISHED
from outbox.batches.prune import prune as prune_batches
from outbox.conf.apps import PIPELINE, add_app, is_pipeline_missing
from outbox.database import Connection, partitions, retention_holds
from outbox.database.locks import END_IDLE_SESSION, Lock
from outbox.database.retention_holds import RetentionHold, find_holder
from outbox.errors import ConfigurationError
from outbox.ids import first_id
from outbox.logs import get_logger, log_fields
from outbox.models import State
from outbox.relay.prune_inbox import prune_inbox

logger = get_logger(__name__)

SLICE = 1000
INBOX = "outbox_inbox"
NOT_LOCKED = "open transactions"  # the next prune will find the day free

# One pruner at a time; others have nothing to do.
TRY_LOCK = f"SELECT pg_try_advisory_lock({Lock.PRUNE}, 0)"

# Records: rows past their time, a slice at a time along an index. A copy of a dead message stays as long as the message
# is dead or on its way again.
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

# Since when brokers keep everything: the first decision whose half messages have no confirmed end, or now.
KEEP_SINCE = f"SELECT least(min(decided_at), clock_timestamp()) FROM outbox_batch WHERE state = {State.PREPARED}"

CLOCKS_DIFFER = timedelta(minutes=1)  # at most so much, a broker's from that of the database which decided

IS_THERE = "SELECT to_regclass(%s) IS NOT NULL"

_old_of_apps: dict[str, str] = {}


def register_table(table: str, old: str) -> None:
    """Add a table of an app to what is pruned, where a database has it. `old`: SQL for its rows that are past `%(before)s`."""
    _old_of_apps[table] = old


@dataclass(slots=True)
class Pruned:
    """
    What a prune did.

    Args:
        days: dropped, oldest first.
        kept: days that are past their time and were kept -> what holds them.
        rows: table -> rows deleted.
    """

    days: list[date] = field(default_factory=list)
    kept: dict[date, str] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        """Return the same as JSON knows it."""
        return asdict(self) | {"days": [str(day) for day in self.days], "kept": {str(k): v for k, v in self.kept.items()}}


def prune(using: str, *, now: datetime | None = None, patience: timedelta = partitions.PATIENCE) -> Pruned:
    """
    Drop days and delete rows that are past `OUTBOX["RETENTION"]`.

    A day is past it when all of it is; what belongs to its messages goes at the same midnight. An app that holds days back may
    keep them longer, and drops them itself.

    Args:
        patience: how long to try for the lock that dropping one day needs.

    Raises:
        ConfigurationError: settings name the pipeline, whose app is not installed.
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
        for day in partitions.days(connection):
            if day < last_kept:
                _prune_day(connection, day, pruned, patience, holds)
        _alert_held(using, pruned, {hold.reason: last_kept - hold.grace for hold in holds})
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


def read_keep_since() -> datetime | None:
    """
    Return since when brokers keep what they have stored, because some of its ends may not be confirmed yet.

    A broker is looked up for half messages whose end had no answer. What it prunes it cannot show, and what it does not show
    is sent again. Every database of the settings is asked: each may have sent to each broker.

    Returns:
        None where a database cannot be read: then nobody can tell, and no broker may prune.
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
                "Brokers are not pruned now: nobody can tell which ends are unconfirmed, since database %r cannot be read. %s",
                *(alias, error),
                extra=log_fields(database=alias),
            )
            return None
        assert row is not None
        found.append(row[0])
    return min(found, default=datetime.now(UTC)) - CLOCKS_DIFFER


def _require_apps() -> None:
    """Raise where settings may hold days back for an app that is not there to say so."""
    if is_pipeline_missing(conf.settings()):
        raise ConfigurationError(
            f'OUTBOX["PIPELINE"] is set, and the app that reads it is not installed: days that it would archive are not pruned. '
            f"{add_app(PIPELINE)} Or remove the setting."
        )


def _prune_day(connection: Connection, day: date, pruned: Pruned, patience: timedelta, holds: Iterable[RetentionHold]) -> None:
    def is_held() -> bool:
        holder = find_holder(connection, *_bounds(day)) or next((hold.reason for hold in holds), None)
        if holder is not None:
            pruned.kept[day] = holder
        return holder is not None

    # Asked before any lock is taken, so that a day that is held stops nobody, not even briefly.
    if is_held():
        return
    if partitions.drop_day(connection, day, unless=is_held, patience=patience):
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
    """Raise an alert for days that should be gone. `free_by`: reason of a hold -> the first day that it may still keep."""

    def is_harmless(day: date, holder: str) -> bool:
        return holder == NOT_LOCKED or (holder in free_by and day >= free_by[holder])

    held = {day: holder for day, holder in pruned.kept.items() if not is_harmless(day, holder)}
    if not held:
        return
    said = ", ".join(f"{day} by {holder}" for day, holder in held.items())
    reason = f"Database {using!r} keeps days of messages past their retention: {said}. See manage.py outbox_status."
    logger.warning(reason, extra=log_fields(database=using))
    signals.alert.send_robust(sender=prune, reason=reason, details={"database": using, "kept": held})
