"""Tells brokers in which outbox the project's groups have their inboxes, so that another project's group is not shared."""

from __future__ import annotations

from contextlib import suppress

import psycopg
from django.db import Error as DatabaseError

from outbox import database
from outbox.brokers.base import Broker
from outbox.consuming.register import groups
from outbox.database.identity import read_identity


def set_owner(broker: Broker, group: str, using: str) -> None:
    """Tell a broker whose a group is: of the outbox in the database of its inbox."""
    broker.set_owner(group, *read_identity(database.raw(using)))


def set_owners(broker: Broker) -> None:
    """Tell a broker whose the project's groups are; those whose database is away are left out."""
    for group in groups().values():
        if broker.alias in group.brokers:
            with suppress(DatabaseError, psycopg.Error):
                set_owner(broker, group.name, group.using)
