"""Hourly maintenance of a database and its brokers: create partitions ahead, prune what is past its retention."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from datetime import date
from functools import partial

from outbox import conf, database
from outbox.database import heartbeats
from outbox.database.partitions import make_days
from outbox.relay.prune import Pruned, prune, read_keep_since

MAINTENANCE_INTERVAL = 3600.0  # seconds


@dataclass(frozen=True, slots=True)
class MaintenanceResult:
    """What was done: the days whose partitions were created, what was pruned, and how many stale heartbeats were deleted."""

    made: list[date]
    pruned: Pruned
    forgotten: int


def maintain(using: str) -> MaintenanceResult:
    """
    Create the partitions of coming days and prune, in a database that has the outbox.

    Raises:
        NotMigrated: the database has no tables of the outbox, or is a replica.
        psycopg.Error: the database failed. The next maintenance continues where this one ended.
    """
    with database.connect(using, application_name="outbox maintenance") as connection:
        database.ensure_fit(using, connection)
        forgotten = heartbeats.forget_stale(connection)
    made = make_days(using)
    pruned = prune(using)
    return MaintenanceResult(made, pruned, forgotten)


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
        with closing(conf.make_broker(alias)) as broker:
            dropped[alias] = sum(iter(partial(broker.prune, keep_since=keep_since), 0))
    return dropped
