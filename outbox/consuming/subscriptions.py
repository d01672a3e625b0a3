"""
The subscriptions of a group's live processes, so that two releases of a group can run side by side.

The heartbeat of each process contains the topics, types and tags that its code has handlers for. If this process has no handler
for a message, but another live process of the group has one, the message is deferred. A message is ignored, and not deferred,
only if no live process of the group subscribes to it.

This module also finds the groups of which a database has rows, whether or not this process has code for them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from django.db import connections

from outbox import database
from outbox.brokers.base import Delivery
from outbox.consuming.delivery_info import DeliveryInfo, columns_of
from outbox.consuming.holdings import read_holdings
from outbox.consuming.register import ANY_TAG, Group, groups, plain_subject
from outbox.database import heartbeats, loop_errors
from outbox.logs import storable
from outbox.message import Header

# How long a process that ended without deregistering counts as live after its last heartbeat. It is long, since Celery tasks send
# few heartbeats.
LIVES_FOR = timedelta(minutes=15)
LIVES_FOR_AT_START = timedelta(hours=1)  # used instead of LIVES_FOR for JUST_STARTED_SECONDS after this process's first heartbeat
JUST_STARTED_SECONDS = 60.0  # after an outage, other live processes may send their next heartbeat later than this process
DEPLOYED_IN = timedelta(hours=1)  # the maximum duration of a deployment

# (database, group) -> the times of two heartbeats of this process: the first one since a long interruption, and the last one.
_beats: dict[tuple[str, str], tuple[float, float]] = {}

SEPARATOR = "\x1f"  # separates topic, subject and tag in a subscription; none of them contains it

# The live processes of a group.
_LIVE = """
SELECT FROM outbox_process p
WHERE p.kind = 'consumer' AND p.consumer_group = %(group)s AND p.beat_at > clock_timestamp() - %(lives_for)s
"""

# Groups whose live processes have different subscriptions. Only processes that started longer ago than a deployment takes count.
READ_DIFFERING_GROUPS = """
SELECT consumer_group FROM outbox_process
WHERE kind = 'consumer' AND beat_at > clock_timestamp() - %(lives_for)s AND started_at < clock_timestamp() - %(deployed_in)s
GROUP BY consumer_group HAVING count(DISTINCT subscriptions) > 1 ORDER BY consumer_group
"""

# Insert an inbox row for each message that no live process of the group subscribes to, so that its number does not look lost. A
# message that is deferred gets no row. Return the indexes of the messages that a live process subscribes to.
IGNORE = f"""
WITH g AS MATERIALIZED (
    SELECT g.*, EXISTS ({_LIVE} AND p.subscriptions && string_to_array(g.matching, chr(10))) AS has_subscriber
    FROM unnest(%(message_ids)s::uuid[], %(sources)s::text[], %(topics)s::text[], %(lanes)s::smallint[], %(numbers)s::bigint[],
        %(matching)s::text[])
        WITH ORDINALITY g (message_id, source, topic, lane, number, matching, ordinal)
), i AS (
    INSERT INTO outbox_inbox (consumer_group, idempotency_key, message_id, source, topic, lane, number, delivery_count)
    SELECT %(group)s, message_id::text, message_id, source, topic, lane, number, 0 FROM g
    WHERE NOT has_subscriber AND NOT EXISTS (
        SELECT FROM outbox_deferred d WHERE d.consumer_group = %(group)s AND d.message_id = g.message_id)
    ON CONFLICT (consumer_group, idempotency_key) DO NOTHING
)
SELECT ordinal - 1 FROM g WHERE has_subscriber
"""


def beat(group: Group, alias: str, *, note: str = "", over: database.Connection | None = None) -> None:
    """Write a heartbeat of this process as a consumer of a group at broker `alias`, through `over` or Django's connection."""
    connection = over or database.raw(group.using)
    refusals, handling = read_holdings(alias, group.name)
    heartbeats.beat(
        connection,
        "consumer",
        broker=alias,
        consumer_group=group.name,
        note=note,
        subscriptions=subscriptions_of(group),
        refusals=refusals,
        errors=loop_errors.read("consumer", group.using, alias, group.name),
        handling=handling,
    )
    now = time.monotonic()
    first, last = _beats.get((group.using, group.name), (now, now))
    _beats[group.using, group.name] = (now if now - last > LIVES_FOR.total_seconds() / 2 else first, now)


def subscriptions_of(group: Group) -> list[str]:
    """Return the subscriptions of a group's handlers, one string for each topic, subject and tag."""
    return sorted(
        SEPARATOR.join((consumer.topic, consumer.subject, tag))
        for consumer in group.consumers.values()
        for tag in consumer.tags or (ANY_TAG,)
    )


def ignore(group: Group, deliveries: Sequence[Delivery]) -> set[int]:
    """Write inbox rows for deliveries that no live process of the group subscribes to; return the indexes of the others."""
    columns = columns_of([DeliveryInfo.of(delivery) for delivery in deliveries])
    matching = [
        storable("\n".join(matching_subscriptions(delivery.topic, delivery.headers.get(Header.TYPE, ""), delivery.tag)))
        for delivery in deliveries
    ]
    first, _ = _beats.get((group.using, group.name), (float("-inf"), 0.0))
    lives_for = LIVES_FOR_AT_START if time.monotonic() - first < JUST_STARTED_SECONDS else LIVES_FOR
    values: dict[str, Any] = {"group": group.name, "lives_for": lives_for, "matching": matching, **columns}
    with connections[group.using].cursor() as cursor:
        cursor.execute(IGNORE, values)
        return {row[0] for row in cursor.fetchall()}


def differing_groups(connection: database.Connection) -> list[str]:
    """Return the groups whose live processes have different subscriptions, although no deployment takes that long."""
    rows = connection.execute(READ_DIFFERING_GROUPS, {"lives_for": timedelta(minutes=1), "deployed_in": DEPLOYED_IN})
    return [row[0] for row in rows]


def matching_subscriptions(topic: str, type_name: str, tag: str) -> list[str]:
    """Return the subscriptions, in the form of `subscriptions_of`, that match a message."""
    return [
        SEPARATOR.join((topic, subject, tag_or_any))
        for subject in (type_name, plain_subject(topic))
        for tag_or_any in (ANY_TAG, tag)
    ]


# The groups that have an inbox row (each found through the index of the inbox's primary key), a deferred message, or a consumer
# that has sent a heartbeat in the last hour (older rows are deleted).
READ_GROUPS = """
WITH RECURSIVE handled AS (
    (SELECT consumer_group AS name FROM outbox_inbox ORDER BY consumer_group LIMIT 1)
    UNION ALL
    SELECT (SELECT consumer_group FROM outbox_inbox WHERE consumer_group > handled.name ORDER BY consumer_group LIMIT 1)
    FROM handled WHERE handled.name IS NOT NULL
), known AS (
    SELECT name FROM handled WHERE name IS NOT NULL
    UNION SELECT consumer_group FROM outbox_deferred
    UNION SELECT consumer_group FROM outbox_process WHERE kind = 'consumer'
)
SELECT name FROM known
"""

# The groups of READ_GROUPS that receive a message. If a group has had consumers in the last hour, their subscriptions decide.
# Otherwise the group counts if it has received from the topic (`number IS NOT NULL`, since only numbered rows are in the index).
READ_RECEIVING_GROUPS = f"""
{READ_GROUPS} WHERE CASE WHEN EXISTS (SELECT FROM outbox_process WHERE kind = 'consumer' AND consumer_group = name)
    THEN EXISTS (
        SELECT FROM outbox_process WHERE kind = 'consumer' AND consumer_group = name AND subscriptions && %(matching)s::text[])
    ELSE EXISTS (
        SELECT FROM outbox_inbox WHERE consumer_group = name AND outbox_inbox.topic = %(topic)s AND number IS NOT NULL)
      OR EXISTS (SELECT FROM outbox_deferred WHERE consumer_group = name AND outbox_deferred.topic = %(topic)s) END
"""

# Delete a group's open gaps and deferred messages of a topic.
DELETE_GROUP = """
WITH gaps AS (DELETE FROM outbox_gap WHERE consumer_group = %(group)s AND topic = %(topic)s AND closed_at IS NULL)
DELETE FROM outbox_deferred WHERE consumer_group = %(group)s AND topic = %(topic)s
"""


def groups_without_code(connection: database.Connection) -> list[str]:
    """Return the groups in a database that this process has no handlers for."""
    return sorted(name for (name,) in connection.execute(READ_GROUPS).fetchall() if name not in groups())


def groups_without_code_for(connection: database.Connection, topic: str, type_name: str, tag: str) -> list[str]:
    """Return the groups of `groups_without_code` that subscribe to a message, or have received from its topic before."""
    values = {"topic": topic, "matching": matching_subscriptions(topic, type_name, tag)}
    return sorted(name for (name,) in connection.execute(READ_RECEIVING_GROUPS, values).fetchall() if name not in groups())


def forget_group(connection: database.Connection, group: str, topic: str) -> None:
    """Delete the deferred messages and open gaps of a group in a topic. Its inbox is kept, so that it handles nothing twice."""
    connection.execute(DELETE_GROUP, {"group": group, "topic": topic})
