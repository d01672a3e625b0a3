"""
The housekeeping of deferred messages, once a minute in each database. Rows that are locked wait for the next time.

Delete the rows of messages that have ended otherwise, note which due messages no live process has a handler for, give those up
after `WAIT_FOR_CODE`, and discard dead letters that are older than DEAD_FOR.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import connections

from outbox import conf, signals
from outbox.consuming.acts import settle
from outbox.consuming.register import all_consumers
from outbox.consuming.subscriptions import LIVES_FOR, matching_subscriptions
from outbox.database import guarded
from outbox.database.loop_errors import Loop, noting
from outbox.logs import get_logger, log_fields
from outbox.models import Act, Deferred

logger = get_logger(__name__)

HOUSEKEEPING_INTERVAL = 60.0  # seconds
WAIT_FOR_CODE = timedelta(hours=9)
NO_CODE = "no process of the group has a handler"

# Messages in both tables: a publisher's copy was handled beside the row, or a zombie handled the message.
DELETE_ENDED = """
DELETE FROM outbox_deferred WHERE id IN (
    SELECT d.id FROM outbox_deferred d
    JOIN outbox_inbox inbox ON inbox.message_id = d.message_id AND inbox.consumer_group = d.consumer_group
    FOR UPDATE OF d SKIP LOCKED)
"""

KINDS = """
SELECT DISTINCT consumer_group, topic, type, tag FROM outbox_deferred WHERE dead_at IS NULL AND due_at <= clock_timestamp()
"""
LIVE = """
SELECT consumer_group, unnest(subscriptions) FROM outbox_process
WHERE kind = 'consumer' AND beat_at > clock_timestamp() - %s
"""

# Sets or clears the time since which no live process has a handler.
NOTE_CODE = """
UPDATE outbox_deferred SET no_code_since = CASE WHEN no_code_since IS NULL THEN clock_timestamp() END WHERE id IN (
    SELECT d.id FROM outbox_deferred d
    JOIN unnest(%s::text[], %s::text[], %s::text[], %s::text[], %s::bool[]) AS kind (consumer_group, topic, type, tag, has_code)
        USING (consumer_group, topic, type, tag)
    WHERE d.dead_at IS NULL AND d.due_at <= clock_timestamp() AND kind.has_code = (d.no_code_since IS NOT NULL)
    FOR UPDATE OF d SKIP LOCKED)
"""

# Messages of a key are given up only where their group skips messages that it cannot handle. Where no process of the group lives,
# nothing is given up.
GIVE_UP = """
UPDATE outbox_deferred SET dead_at = clock_timestamp(), error = %(error)s, fingerprint = %(error)s WHERE id IN (
    SELECT d.id FROM outbox_deferred d JOIN (
        SELECT consumer_group, min(started_at) AS since FROM outbox_process
        WHERE kind = 'consumer' AND beat_at > clock_timestamp() - %(lives_for)s GROUP BY 1) live USING (consumer_group)
    WHERE d.dead_at IS NULL AND d.no_code_since IS NOT NULL AND d.due_at <= clock_timestamp()
        AND greatest(d.no_code_since, live.since) < clock_timestamp() - %(wait)s
        AND (d.order_key IS NULL OR (d.consumer_group, d.topic) IN (SELECT * FROM unnest(%(groups)s::text[], %(topics)s::text[])))
    FOR UPDATE OF d SKIP LOCKED)
RETURNING consumer_group, own_id, topic
"""


def tidy(using: str) -> None:
    """Do the housekeeping of a database once, over Django's connection."""
    with noting(Loop("housekeeping", using)):
        with guarded.atomic(using), connections[using].cursor() as cursor:
            cursor.execute(DELETE_ENDED)
        _note_code(using)
        _give_up(using)
        if dead_for := conf.settings().consumer.dead_for:
            old = Deferred.objects.using(using).filter(dead_at__lt=datetime.now(UTC) - dead_for)
            for _ in settle(old, Act.DISCARDED, by="housekeeping", reason='older than OUTBOX["CONSUMER"]["DEAD_FOR"]'):
                pass


def _note_code(using: str) -> None:
    with guarded.atomic(using), connections[using].cursor() as cursor:
        cursor.execute(KINDS)
        kinds = cursor.fetchall()
        recently: list[Any] = [LIVES_FOR]
        cursor.execute(LIVE, recently)
        live = set(cursor.fetchall())
        has_code = [
            any((group, subscription) in live for subscription in matching_subscriptions(*kind)) for group, *kind in kinds
        ]
        if kinds:
            cursor.execute(NOTE_CODE, [*map(list, zip(*kinds, strict=True)), has_code])


def _give_up(using: str) -> None:
    consumers = [consumer for consumer in all_consumers() if consumer.is_ordered]
    blocking = {(consumer.group, consumer.topic) for consumer in consumers if consumer.on_dead == "block"}
    skipping = sorted({(consumer.group, consumer.topic) for consumer in consumers} - blocking)
    values: dict[str, Any] = {
        "error": NO_CODE,
        "lives_for": LIVES_FOR,
        "wait": WAIT_FOR_CODE,
        "groups": [group for group, _ in skipping],
        "topics": [topic for _, topic in skipping],
    }
    with guarded.atomic(using), connections[using].cursor() as cursor:
        cursor.execute(GIVE_UP, values)
        given_up = cursor.fetchall()
    for group, message_id, topic in given_up:
        fields = log_fields(message_id=message_id, topic=topic, group=group)
        logger.error("Message %s is a dead letter of group %r: %s", message_id, group, NO_CODE, extra=fields)
        signals.dead_lettered.send_robust(sender=tidy, group=group, message_id=message_id, topic=topic, reason=NO_CODE)
