"""
Set the owners of consumer groups at brokers, so that two projects do not share a group.

The owner of a group is the outbox in the database that has the group's inbox. Brokers store its source id and project.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress
from typing import Any

import psycopg
from django.db import Error as DatabaseError

from outbox import conf, database
from outbox.brokers.base import Broker
from outbox.brokers.capabilities import Receives
from outbox.consuming.register import Group, groups
from outbox.database.identity import require_identity
from outbox.errors import NotMigrated


def set_owner(broker: Receives, group: str, using: str, **more: Any) -> None:
    """Make the outbox in database `using` the owner of a group at a broker; the broker's `set_owner` also gets `more`."""
    broker.set_owner(group, *require_identity(database.raw(using)), **more)


# The topics, of those given, from which a group has received. `number IS NOT NULL` lets the query use the index, which has only
# numbered rows.
KNOWN_TOPICS = """
SELECT topic FROM unnest(%(topics)s::text[]) topic
WHERE EXISTS (SELECT FROM outbox_inbox i WHERE i.consumer_group = %(group)s AND i.topic = topic.topic AND i.number IS NOT NULL)
OR EXISTS (SELECT FROM outbox_deferred d WHERE d.consumer_group = %(group)s AND d.topic = topic.topic)
"""


def set_owner_and_topics(broker: Receives, group: Group) -> None:
    """Pass a group's owner to a broker, and the topics that the group has received; call this before the first `receive`."""
    rows = database.raw(group.using).execute(KNOWN_TOPICS, {"group": group.name, "topics": group.topics}).fetchall()
    set_owner(broker, group.name, group.using, known_topics=[topic for (topic,) in rows])


def take_over(chosen: Sequence[Group]) -> None:
    """
    Make the outboxes of this project the owners of its groups `chosen`, instead of the current owners.

    Raises:
        NotMigrated, OtherProject: a database cannot be the inbox of a group. No owner was changed.
        BrokerUnavailable: a broker did not change the owner of a group. Earlier groups in `chosen` were taken over.
    """
    for group in chosen:
        database.ensure_fit(group.using, database.raw(group.using))
    for group in chosen:
        for alias in group.brokers:
            with closing(Receives.of(conf.make_broker(alias))) as broker:
                set_owner(broker, group.name, group.using, take_over=True)


def set_owners(broker: Broker) -> None:
    """Set the owners of the project's groups at a broker; skip groups whose database has no outbox or is unavailable."""
    databases = database.outbox_databases()
    for group in groups().values():
        if broker.alias in group.brokers and group.using in databases:
            with suppress(DatabaseError, psycopg.Error, NotMigrated):
                set_owner(Receives.of(broker), group.name, group.using)
