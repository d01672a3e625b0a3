"""
The messages that a group's live processes want, so that two releases of a group can run side by side.

The heartbeat of each process has the types and tags that its code handles. A message that this process does not know and another
one wants is handed back; only a message that no live process wants is ignored for good.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from django.db import connections

from outbox import database
from outbox.brokers.base import Delivery
from outbox.consuming import holdings
from outbox.consuming.delivery_info import DeliveryInfo, columns_of
from outbox.consuming.register import Group, plain_subject
from outbox.database import heartbeats, loop_errors
from outbox.message import Header

# Since the last heartbeat of a process that did not deregister: a Celery task beats between two handlers.
LIVES_FOR = timedelta(minutes=15)
REMEMBERED_FOR = timedelta(hours=1)  # for a process that has just started: after an outage the others may beat a moment later
JUST_BEGUN_SECONDS = 60.0
DEPLOYED_IN = timedelta(hours=1)

# Database and group -> first and last heartbeat of an uninterrupted series.
_beats: dict[tuple[str, str], tuple[float, float]] = {}

_ANY = "*"
_BETWEEN = "\x1f"  # separates the parts of a text below; no topic, type or tag contains it

_LIVE = """
SELECT FROM outbox_process p
WHERE p.kind = 'consumer' AND p.consumer_group = %(group)s AND p.beat_at > clock_timestamp() - %(lives_for)s
"""

IS_WANTED = f"SELECT EXISTS ({_LIVE} AND p.wants && %(answers_to)s::text[])"

# Groups whose live processes have had different code for longer than a deployment takes.
DIFFERING = """
SELECT consumer_group FROM outbox_process
WHERE kind = 'consumer' AND beat_at > clock_timestamp() - %(lives_for)s AND started_at < clock_timestamp() - %(deployed_in)s
GROUP BY consumer_group HAVING count(DISTINCT wants) > 1 ORDER BY consumer_group
"""

# Records each message that no live process of the group wants, so that its number does not look lost; returns the places of
# those that a process wants.
IGNORE = f"""
WITH g AS MATERIALIZED (
    SELECT g.*, EXISTS ({_LIVE} AND p.wants && string_to_array(g.answers_to, chr(10))) AS is_wanted
    FROM unnest(%(message_ids)s::uuid[], %(sources)s::text[], %(topics)s::text[], %(lanes)s::smallint[], %(numbers)s::bigint[],
        %(answers_to)s::text[])
        WITH ORDINALITY g (message_id, source, topic, lane, number, answers_to, place)
), i AS (
    INSERT INTO outbox_inbox (consumer_group, dedupe_key, message_id, source, topic, lane, number, delivery_count)
    SELECT %(group)s, message_id::text, message_id, source, topic, lane, number, 0 FROM g WHERE NOT is_wanted
    ON CONFLICT (consumer_group, dedupe_key) DO NOTHING
)
SELECT place - 1 FROM g WHERE is_wanted
"""


def beat(group: Group, alias: str, *, note: str = "", over: database.Connection | None = None) -> None:
    """Write a heartbeat as a consumer of a group, with what it wants and holds; by default over Django's connection."""
    connection = over or database.raw(group.using)
    found = holdings.read(alias, group.name)
    heartbeats.beat(
        connection,
        "consumer",
        broker=alias,
        consumer_group=group.name,
        note=note,
        wants=wants_of(group),
        holds=found.held,
        refusals=found.refusals,
        errors=loop_errors.read("consumer", group.using, alias, group.name),
        handling=found.handling,
    )
    now = time.monotonic()
    began, last = _beats.get((group.using, group.name), (now, now))
    _beats[group.using, group.name] = (now if now - last > LIVES_FOR.total_seconds() / 2 else began, now)


def _lives_for(group: Group) -> timedelta:
    """Return how long a silent process that did not deregister still counts as alive."""
    began, _ = _beats.get((group.using, group.name), (float("-inf"), 0.0))
    return REMEMBERED_FOR if time.monotonic() - began < JUST_BEGUN_SECONDS else LIVES_FOR


def wants_of(group: Group) -> list[str]:
    """Return what a group's handlers want, one string for each topic, subject and tag."""
    return sorted(_BETWEEN.join((one.topic, one.subject, tag)) for one in group.consumers.values() for tag in one.tags or (_ANY,))


def ignore(group: Group, deliveries: Sequence[Delivery]) -> set[int]:
    """Ignore deliveries that no live process of the group wants. Return the places of the others in the sequence."""
    columns = columns_of([DeliveryInfo.of(one) for one in deliveries])
    answers_to = ["\n".join(_answers_to(one)) for one in deliveries]
    with connections[group.using].cursor() as cursor:
        cursor.execute(IGNORE, _values(group, answers_to=answers_to, **columns))
        return {row[0] for row in cursor.fetchall()}


def differing_groups(connection: database.Connection) -> list[str]:
    """Return the groups whose live processes have wanted different messages for longer than a deployment takes."""
    rows = connection.execute(DIFFERING, {"lives_for": timedelta(minutes=1), "deployed_in": DEPLOYED_IN})
    return [row[0] for row in rows]


def is_wanted(group: Group, delivery: Delivery) -> bool:
    """Return whether a live process of the group wants a delivery."""
    with connections[group.using].cursor() as cursor:
        cursor.execute(IS_WANTED, _values(group, answers_to=_answers_to(delivery)))
        return bool(cursor.fetchone()[0])


def _values(group: Group, **more: Any) -> dict[str, Any]:
    return {"group": group.name, "lives_for": _lives_for(group), **more}


def _answers_to(delivery: Delivery) -> list[str]:
    return answers_to(delivery.topic, delivery.headers.get(Header.TYPE, ""), delivery.tag)


def answers_to(topic: str, type_name: str, tag: str) -> list[str]:
    """Return each string of `wants_of` that matches a message."""
    return [_BETWEEN.join((topic, one, any_)) for one in (type_name, plain_subject(topic)) for any_ in (_ANY, tag)]
