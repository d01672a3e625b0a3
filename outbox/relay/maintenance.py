"""Hourly maintenance of a database and its brokers: create partitions ahead, prune what is past its retention."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from datetime import date
from functools import partial

from outbox import conf, database
from outbox.database import Connection, heartbeats, partitions
from outbox.database.loop_errors import Loop, noting
from outbox.errors import ConfigurationError
from outbox.relay.prune import Pruned, prune, read_keep_since

MAINTENANCE_INTERVAL = 3600.0  # seconds
MAINTENANCE = "maintenance"  # the loop


@dataclass(frozen=True, slots=True)
class MaintenanceResult:
    """What was done: the days whose partitions were created, what was pruned, and how many stale heartbeats were deleted."""

    made: list[date]
    pruned: Pruned
    forgotten: int

    def as_json(self) -> dict[str, object]:
        """Return what was made and pruned as a dict that can be encoded as JSON."""
        return {"made": [str(day) for day in self.made]} | self.pruned.as_json()


def maintain(using: str) -> MaintenanceResult:
    """
    Create the partitions of coming days and prune, in a database that has the outbox.

    A role that does not own the tables leaves partitions to the one that does, and deletes rows only. Rows are also deleted where
    partitions cannot be created.

    Raises:
        NotMigrated: the database has no tables of the outbox, or is a replica.
        ConfigurationError: this role may not create partitions, and the one that may has not created that of tomorrow.
        psycopg.Error: the database failed. The next maintenance continues where this one ended.
    """
    with noting(Loop(MAINTENANCE, using)):
        with database.connect(using, application_name="outbox maintenance") as connection:
            database.ensure_fit(using, connection)
            forgotten = heartbeats.forget_stale(connection)
            is_ours = partitions.rights(connection).may_create
        try:
            made = partitions.make_days(using) if is_ours else []
        finally:
            pruned = prune(using)
        if not is_ours:
            with database.connect(using, application_name="outbox maintenance") as connection:
                _require_tomorrow(using, connection)
    return MaintenanceResult(made, pruned, forgotten)


def _require_tomorrow(using: str, connection: Connection) -> None:
    if partitions.lacks_tomorrow(partitions.days(connection)):
        found = partitions.rights(connection)
        why = "lacks CREATE on the schema" if found.may_drop else "does not own outbox_message"
        raise ConfigurationError(
            f"Database {using!r} has no partition for tomorrow, and role {found.role!r} may not create it, because it {why}. "
            f"Run manage.py outbox_maintenance as {found.owner!r}, from cron or at each deployment. No message is lost meanwhile."
        )


def prune_brokers(aliases: Iterable[str]) -> dict[str, int]:
    """
    Delete messages that are past their topics' retention from brokers; return how many rows each deleted.

    Does nothing, and returns an empty dict, while a database cannot be asked which half messages have no confirmed end.

    Raises:
        BrokerUnavailable: a broker cannot be reached.
    """
    keep_since = read_keep_since()
    if keep_since is None:
        return {}
    dropped = {}
    for alias in sorted(set(aliases)):
        with noting(Loop("maintenance of the broker", broker=alias)), closing(conf.make_broker(alias)) as broker:
            dropped[alias] = sum(iter(partial(broker.prune, keep_since=keep_since), 0))
    return dropped
