"""
Hourly maintenance of a database and its brokers: create daily partitions ahead, and prune data that is past its retention.

To prune a database is to drop the daily partitions of old messages, and to delete other old rows in slices, in autocommit. Only
one process at a time prunes a database. Unfinished work is kept, however old it is: a daily partition is not dropped while it has
a message that has a ticket, is delayed, or is in an unfinished batch, or a dead message that has no copy.

A row of the inbox is kept as long as the broker may deliver its message again, or the message is among the group's deferred ones.
If a consumer dies between its database commit and the acknowledgement, the message is redelivered, perhaps only weeks later, when
its group is started again. Without the inbox row, the message would be handled twice.

An app may hold daily partitions back (`RetentionHold`), as the archive does. Then that app drops these partitions, and deletes
the rows that belong to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

import msgspec
import psycopg
from msgspec.structs import asdict
from psycopg.rows import namedtuple_row

from outbox import conf, database, signals
from outbox.batches.prune import prune as prune_batches
from outbox.brokers.capabilities import Receives
from outbox.conf.apps import explain_pipeline, is_pipeline_missing
from outbox.database import Connection, heartbeats, partitions
from outbox.database.locks import END_IDLE_SESSION, Lock
from outbox.database.loop_errors import Loop, recording
from outbox.database.retention_holds import find_holder
from outbox.errors import ConfigurationError, OutboxError
from outbox.extensions import RetentionHold, extensions
from outbox.ids import day_at, first_id, midnight
from outbox.logs import get_logger, log_fields
from outbox.models import UNFINISHED, State

MAINTENANCE_INTERVAL = 3600.0  # seconds
MAINTENANCE = "maintenance"  # the name under which errors of the maintenance are recorded (`loop_errors.py`)


def maintain(using: str) -> Pruned:
    """
    Create the daily partitions of the next days and prune, in a database that has the outbox.

    A role that does not own the tables only deletes rows, and leaves partitions to their owner. Rows are also deleted if creating
    partitions fails.

    Raises:
        NotMigrated: the database has no tables of the outbox, or is a replica.
        ConfigurationError: this role may not create partitions, and the owner of the tables has not created that of tomorrow.
        psycopg.Error: the database failed. The next maintenance continues where this one ended.
    """
    with recording(Loop(MAINTENANCE, using)):
        with database.connect(using, application_name="outbox maintenance") as connection:
            database.ensure_fit(using, connection)
            heartbeats.forget_stale(connection)
            may_create = partitions.rights(connection).may_create
        try:
            made = partitions.create_partitions(using) if may_create else []
        finally:
            pruned = prune(using)
        if not may_create:
            with database.connect(using, application_name="outbox maintenance") as connection:
                _require_tomorrow(using, connection)
    pruned.made = made
    return pruned


def _require_tomorrow(using: str, connection: Connection) -> None:
    if partitions.lacks_tomorrow(partitions.days(connection)):
        rights = partitions.rights(connection)
        why = "lacks CREATE on the schema" if rights.may_drop else "does not own outbox_message"
        raise ConfigurationError(
            f"Database {using!r} has no partition for tomorrow, and role {rights.role!r} may not create it: the role {why}.",
            hint=f"Run manage.py outbox_maintenance as {rights.owner!r}, from cron or at each deployment. "
            "No message is lost meanwhile.",
        )


def prune_brokers(aliases: Iterable[str]) -> dict[str, int]:
    """
    Delete messages that are past their topics' retention from brokers; return the number of deleted rows of each.

    Does nothing, and returns an empty dict, while it is unknown which half messages have no confirmed end, since a database
    cannot be read.

    Raises:
        BrokerUnavailable: a broker cannot be reached.
    """
    keep_since = read_keep_since()
    if keep_since is None:
        return {}
    dropped = {}
    for alias in sorted(set(aliases)):
        with recording(Loop("maintenance of the broker", broker=alias)), closing(conf.make_broker(alias)) as broker:
            dropped[alias] = sum(iter(partial(broker.prune, keep_since=keep_since), 0))
    return dropped


logger = get_logger(__name__)

SLICE = 1000
INBOX = "outbox_inbox"
# Reasons in `Pruned.kept`. Open transactions have kept the partition from being locked, so the next prune tries again.
NOT_LOCKED = "open transactions"
OWNED_BY_ANOTHER_ROLE = "another role, which owns the tables and has to run outbox_maintenance"
SESSION_LIMIT = timedelta(seconds=10)  # the timeouts for locks and for idle transactions
OTHER_ROLE_GRACE = timedelta(days=2)  # the time after its retention in which the other role has to drop a partition

# One process prunes at a time; a second one has nothing to do.
TRY_LOCK = f"SELECT pg_try_advisory_lock({Lock.PRUNE}, 0)"

# The database's clock, which has written most of the times below, decides what is past its retention.
NOW = "SELECT clock_timestamp()"

# Rows past their retention are deleted in slices, through an index. OLD_ROWS has each table's condition for these rows. The copy
# of a dead message is kept while the message is dead, or is being sent again. In these tables, a locked row is left for the next
# prune: a publisher may be taking an expired idempotency key in a long transaction. FOR UPDATE needs the privilege UPDATE, which
# tables of apps may lack.
DELETE_FROM = "DELETE FROM {table} WHERE ctid = ANY(ARRAY(SELECT ctid FROM {table} WHERE {condition} LIMIT %(limit)s {unlocked}))"
UNLOCKED = "FOR UPDATE SKIP LOCKED"
OLD_ROWS = {
    "outbox_failed_delivery": "failed_at < %(before)s",
    "outbox_duplicate": "dropped_at < %(before)s",
    "outbox_check_back": "answered_at < %(before)s",
    "outbox_failed_send": "failed_at < %(before)s",
    "outbox_operator_act": "acted_at < %(before)s",
    "outbox_gap": "closed_at < %(before)s",
    "outbox_idempotency_key": "expires_at < %(now)s",
    "outbox_dead": f"""
        died_at < %(before)s AND NOT EXISTS (
            SELECT FROM outbox_batch b
            WHERE (b.state IN {UNFINISHED} OR b.state = {State.DEAD}) AND outbox_dead.message_id = ANY(b.message_ids))""",
}

# The time from which brokers have to keep all messages: the first decision with unconfirmed ends of half messages, otherwise now.
KEEP_SINCE = f"SELECT least(min(decided_at), clock_timestamp()) FROM outbox_batch WHERE state = {State.PREPARED}"

CLOCK_DIFFERENCE = timedelta(minutes=1)  # the maximum expected between a broker and the database that wrote the decision

IS_THERE = "SELECT to_regclass(%s) IS NOT NULL"


class Pruned(msgspec.Struct):
    """
    The result of a prune, or of the maintenance.

    Args:
        made: the days whose partitions were created.
        days: the days whose partitions were dropped, oldest first.
        kept: day past its retention whose partition was kept -> the reason.
        rows: table -> number of rows deleted.
    """

    made: list[date] = msgspec.field(default_factory=list)
    days: list[date] = msgspec.field(default_factory=list)
    kept: dict[date, str] = msgspec.field(default_factory=dict)
    rows: dict[str, int] = msgspec.field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        """Return the result as a dict that can be encoded as JSON."""
        days = {name: list(map(str, getattr(self, name))) for name in ("made", "days")}
        return asdict(self) | days | {"kept": {str(day): holder for day, holder in self.kept.items()}}


def prune(using: str, *, now: datetime | None = None) -> Pruned:
    """
    Drop the daily partitions, and delete the rows, that are past `OUTBOX["RETENTION"]`.

    A partition is past its retention when its whole day is. Apps that hold partitions back may keep them longer, and drop them
    themselves. A role that does not own the tables only deletes rows. If another process is pruning, do nothing.

    Args:
        now: the current time, by default that of the database's clock.

    Raises:
        ConfigurationError: the settings configure the pipeline, but its app is not installed.
    """
    _require_apps()
    holds = _active_holds()
    pruned = Pruned()
    with database.connect_session(using, application_name="outbox maintenance", patience=SESSION_LIMIT) as connection:
        connection.execute(END_IDLE_SESSION)
        if connection.execute(TRY_LOCK).fetchone() != (True,):
            return pruned
        now = now or connection.execute(NOW).fetchall()[0][0]
        last_kept = day_at(now - max([conf.settings().retention, *holds.values()]))
        before = midnight(last_kept)
        may_drop = partitions.rights(connection).may_drop  # checked first, so that no lock is taken for nothing
        for day in partitions.days(connection):
            if day < last_kept:
                if may_drop:
                    _prune_day(connection, day, pruned, holds)
                else:
                    pruned.kept[day] = OWNED_BY_ANOTHER_ROLE
        first_allowed = {hold.reason: last_kept - hold.grace for hold in holds}
        _alert_held(using, pruned, first_allowed | {OWNED_BY_ANOTHER_ROLE: last_kept - OTHER_ROLE_GRACE})
        pruned.rows["outbox_batch"] = prune_batches(
            connection, before=before, kept=[_bounds(day) for day in [*pruned.kept, last_kept]]
        )
        app_tables = {table for hold in holds for table in hold.tables}
        if INBOX not in app_tables:
            pruned.rows[INBOX] = prune_inbox(connection, before=before)
        tables_of_apps = {table: condition for extension in extensions() for table, condition in extension.tables.items()}
        existing = {
            table: condition
            for table, condition in tables_of_apps.items()
            if connection.execute(IS_THERE, [table]).fetchone() == (True,)
        }
        for table, condition in (OLD_ROWS | existing).items():
            if table not in app_tables:
                pruned.rows[table] = _delete_old_rows(connection, table, condition, before=before, now=now)
    return pruned


def _active_holds() -> dict[RetentionHold, timedelta]:
    """Return the holds of apps that are active now, each with how long it needs messages."""
    holds = [extension.retention_hold for extension in extensions()]
    return {hold: retention for hold in holds if hold and (retention := hold.retention()) is not None}


def overdue(days: Iterable[date]) -> list[date]:
    """Return the days whose partitions should have been dropped by now, by this role, another role, or an app."""
    holds = _active_holds()
    kept_for = max([conf.settings().retention, *holds.values()]) + max([OTHER_ROLE_GRACE, *(hold.grace for hold in holds)])
    first = day_at(datetime.now(UTC) - kept_for)
    return [day for day in days if day < first]


def read_keep_since() -> datetime | None:
    """
    Return the time from which brokers have to keep their messages, because ends of half messages may not be confirmed yet.

    A half message whose end got no answer is looked up at its broker, and sent again if the broker does not have it. So a broker
    must not prune it before. All databases of the settings are read, since each may have sent to each broker.

    Returns:
        The time; None if a database cannot be read, so that the time is unknown, and no broker may prune.
    """
    starts = []
    for alias in database.outbox_databases():
        try:
            with database.connect(alias, application_name="outbox maintenance") as connection:
                [(keep_since,)] = connection.execute(KEEP_SINCE).fetchall()
        except psycopg.errors.UndefinedTable:  # no outbox there, so it has sent nothing
            continue
        except psycopg.Error as error:
            logger.warning(
                "Brokers are not pruned now: which messages they have to keep is unknown, since database %r cannot be read: %s",
                *(alias, error),
                extra=log_fields(database=alias),
            )
            return None
        starts.append(keep_since)
    return min(starts, default=datetime.now(UTC)) - CLOCK_DIFFERENCE


def _require_apps() -> None:
    """Raise an error if the settings configure the pipeline, which may hold partitions back, but its app is not installed."""
    if is_pipeline_missing(conf.settings()):
        cause, hint = explain_pipeline()
        raise ConfigurationError(
            f'OUTBOX["PIPELINE"] is set, but {cause}. Nothing is pruned, since the app might have to archive it first.',
            hint=f"{hint} Or remove the setting.",
        )


def _prune_day(connection: Connection, day: date, pruned: Pruned, holds: Iterable[RetentionHold]) -> None:
    """Drop the partition of a day, or record in `pruned` why it is kept."""

    def is_held() -> bool:
        holder = find_holder(connection, *_bounds(day)) or next((hold.reason for hold in holds), None)
        if holder is not None:
            pruned.kept[day] = holder
        return holder is not None

    # Checked before a lock is taken, so that a partition that is held back blocks no other transaction.
    if is_held():
        return
    try:
        is_dropped = partitions.drop_partition(connection, day, unless=is_held)
    except psycopg.errors.InsufficientPrivilege:  # another role has created this partition
        pruned.kept[day] = OWNED_BY_ANOTHER_ROLE
        return
    if is_dropped:
        pruned.days.append(day)
    else:
        pruned.kept.setdefault(day, NOT_LOCKED)


def _delete_old_rows(connection: Connection, table: str, condition: str, *, before: datetime, now: datetime) -> int:
    statement = DELETE_FROM.format(table=table, condition=condition, unlocked=UNLOCKED if table in OLD_ROWS else "")
    deleted = 0
    while True:
        count = connection.execute(statement, {"before": before, "now": now, "limit": SLICE}).rowcount
        deleted += count
        if count < SLICE:
            return deleted


def _bounds(day: date) -> tuple[UUID, UUID]:
    return first_id(day), first_id(day + timedelta(days=1))


def _alert_held(using: str, pruned: Pruned, first_allowed: Mapping[str, date]) -> None:
    """
    Send an alert for days whose partitions are kept too long after their retention.

    Args:
        first_allowed: reason of a hold -> the first day whose partition may still be kept for it.
    """

    def is_harmless(day: date, holder: str) -> bool:
        return holder == NOT_LOCKED or (holder in first_allowed and day >= first_allowed[holder])

    held = {day: holder for day, holder in pruned.kept.items() if not is_harmless(day, holder)}
    if not held:
        return
    days = ", ".join(f"{day} ({holder})" for day, holder in held.items())
    reason = f"Database {using!r} keeps daily partitions past their retention: {days}. See manage.py outbox_status."
    logger.warning(reason, extra=log_fields(database=using))
    signals.alert.send_robust(sender=prune, reason=reason, details={"database": using, "kept": held})


INBOX_SLICE = 10_000  # rows about which the brokers are asked at a time

# A slice of rows past their retention, oldest first, after the last row of the previous slice. Two kinds of messages are
# excluded, since they would be handled again: those that are also deferred, and may be replayed; and those whose batch is
# unfinished or dead, since a relay may have sent it and died before it marked it SENT, so that it is sent again. Topics whose
# broker could not be asked are excluded, too.
READ_OLD = f"""
WITH unfinished AS MATERIALIZED (
    SELECT unnest(message_ids) AS message_id FROM outbox_batch WHERE state IN {UNFINISHED} OR state = {State.DEAD}
)
SELECT handled_at, consumer_group, idempotency_key, message_id::text, topic FROM outbox_inbox inbox
WHERE handled_at < %(before)s AND handled_at >= %(after_at)s
    AND NOT EXISTS (SELECT FROM unfinished WHERE unfinished.message_id = inbox.message_id)
    AND (handled_at, consumer_group, idempotency_key) > (%(after_at)s, %(after_group)s, %(after_key)s)
    AND topic <> ALL(%(unavailable)s) AND NOT EXISTS (
        SELECT FROM outbox_deferred deferred
        WHERE deferred.message_id = inbox.message_id AND deferred.consumer_group = inbox.consumer_group)
ORDER BY handled_at, consumer_group, idempotency_key LIMIT %(limit)s
"""

# Delete rows of a slice by their keys, if they are still past their retention.
DELETE = """
DELETE FROM outbox_inbox inbox USING unnest(%s::text[], %s::text[]) AS old (consumer_group, idempotency_key)
WHERE inbox.consumer_group = old.consumer_group AND inbox.idempotency_key = old.idempotency_key AND inbox.handled_at < %s
"""

READ_BROKERS = "SELECT name, broker FROM outbox_topic"

BEGINNING = datetime(1, 1, 1, tzinfo=UTC)


def prune_inbox(connection: Connection, *, before: datetime) -> int:
    """
    Delete inbox rows whose messages are not delivered again; return their number.

    If a broker cannot be reached, the rows of its topics are kept until the next prune.

    Args:
        connection: in autocommit.
        before: rows of messages that were handled at this time or later are kept.
    """
    deleted = 0
    at, group, key = BEGINNING, "", ""
    with ExitStack() as stack:
        brokers = _Brokers(_broker_of(connection), stack)
        while True:
            after = {"after_at": at, "after_group": group, "after_key": key}
            values = after | {"before": before, "unavailable": sorted(brokers.unavailable), "limit": INBOX_SLICE}
            rows: list[Any] = connection.cursor(row_factory=namedtuple_row).execute(READ_OLD, values).fetchall()
            finished = brokers.without_redeliveries(rows)
            keys = [row.consumer_group for row in finished], [row.idempotency_key for row in finished]
            deleted += connection.execute(DELETE, [*keys, before]).rowcount if finished else 0
            if len(rows) < INBOX_SLICE:
                return deleted
            at, group, key, *_ = rows[-1]


def _broker_of(connection: Connection) -> dict[str, str]:
    """Return each topic's broker: from the settings, and for topics that are no longer there, from the database."""
    settings = conf.settings()
    known: dict[str, str] = {name: broker for name, broker in connection.execute(READ_BROKERS) if broker in settings.brokers}
    return known | {name: topic.broker for name, topic in settings.topics.items()}


class _Brokers:
    """
    The brokers that are asked which messages they may deliver again; clients are made at first use.

    Args:
        broker_of: topic -> alias of its broker.
        stack: closes the clients.
    """

    def __init__(self, broker_of: dict[str, str], stack: ExitStack) -> None:
        self.unavailable: set[str] = set()  # topics whose broker could not be asked
        self._broker_of = broker_of
        self._stack = stack
        self._clients: dict[str, Receives] = {}

    def without_redeliveries(self, rows: Iterable[Any]) -> list[Any]:
        """Return the rows whose messages are certainly not delivered again; exclude rows whose broker cannot be asked."""
        ids_by_group: dict[tuple[str, str], set[str]] = {}
        for row in rows:
            alias = self._broker_of.get(row.topic)
            if alias is not None:  # None: no broker has the topic any more
                ids_by_group.setdefault((alias, row.consumer_group), set()).add(row.message_id)
        redeliverable = {
            (group, message_id) for (alias, group), ids in ids_by_group.items() for message_id in self._ask(alias, group, ids)
        }
        return [
            row for row in rows if row.topic not in self.unavailable and (row.consumer_group, row.message_id) not in redeliverable
        ]

    def _ask(self, alias: str, group: str, ids: set[str]) -> set[str]:
        """Return the `ids` that a broker may deliver again. If it cannot be asked, its topics become `unavailable`."""
        try:
            broker_class = conf.broker_class(alias)
            if not issubclass(broker_class, Receives) or broker_class.may_deliver_again is Receives.may_deliver_again:
                return set()  # the inherited method always returns an empty set, so no client is made
            if alias not in self._clients:
                self._clients[alias] = self._stack.enter_context(closing(Receives.of(conf.make_broker(alias))))
            return self._clients[alias].may_deliver_again(group, ids)
        except OutboxError as error:
            self.unavailable |= {topic for topic, broker in self._broker_of.items() if broker == alias}
            logger.warning(
                "Inbox rows of topics on broker %r are not pruned now: %s", alias, error, extra=log_fields(broker=alias)
            )
            return set()
