"""
The housekeeping of deferred messages, once a minute in each database. Locked rows are skipped until the next time.

Housekeeping deletes the deferred rows of messages that also have an inbox row; records since when no live process has a handler
for a due message; turns such messages into dead letters after `WAIT_FOR_CODE`; and discards dead letters that are older than
OUTBOX["CONSUMER"]["DEAD_FOR"].
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db import connections
from django.db.models.functions import Now

from outbox import conf, signals
from outbox.consuming.acts import settle
from outbox.consuming.register import all_consumers
from outbox.consuming.subscriptions import LIVES_FOR, matching_subscriptions
from outbox.database import guarded
from outbox.database.loop_errors import Loop, recording
from outbox.logs import get_logger, log_fields
from outbox.models import Act, Deferred

logger = get_logger(__name__)

HOUSEKEEPING_INTERVAL = 60.0  # seconds
WAIT_FOR_CODE = timedelta(hours=9)  # as long as the retries of `outcome.RETRY_FOR_CODE` take
NO_CODE = "no process of the group has a handler"

# Delete the deferred rows of messages that the inbox has, too: the publisher had sent a second copy, which was handled; or a
# process that had lost its lease handled the message.
DELETE_ENDED = """
DELETE FROM outbox_deferred WHERE id IN (
    SELECT d.id FROM outbox_deferred d
    JOIN outbox_inbox inbox ON inbox.message_id = d.message_id AND inbox.consumer_group = d.consumer_group
    FOR UPDATE OF d SKIP LOCKED)
"""

# The groups, topics, types and tags of due messages, to look for a process that has a handler for each.
READ_KINDS = """
SELECT DISTINCT consumer_group, topic, type, tag FROM outbox_deferred WHERE dead_at IS NULL AND due_at <= clock_timestamp()
"""
READ_LIVE_SUBSCRIPTIONS = """
SELECT consumer_group, unnest(subscriptions) FROM outbox_process
WHERE kind = 'consumer' AND beat_at > clock_timestamp() - %s
"""

# Set `no_code_since`, the time since which no live process has a handler for a message; set it to NULL if one has a handler now.
UPDATE_NO_CODE_SINCE = """
UPDATE outbox_deferred SET no_code_since = CASE WHEN no_code_since IS NULL THEN clock_timestamp() END WHERE id IN (
    SELECT d.id FROM outbox_deferred d
    JOIN unnest(%s::text[], %s::text[], %s::text[], %s::text[], %s::bool[]) AS kind (consumer_group, topic, type, tag, has_code)
        USING (consumer_group, topic, type, tag)
    WHERE d.dead_at IS NULL AND d.due_at <= clock_timestamp() AND kind.has_code = (d.no_code_since IS NOT NULL)
    FOR UPDATE OF d SKIP LOCKED)
"""

# Turn messages into dead letters that have had no handler for `wait`, while a process of their group was running. A message with
# an order key is included only if all handlers of its group and topic have on_dead="skip".
MAKE_DEAD = """
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
    """Do the housekeeping of a database once, through Django's connection."""
    with recording(Loop("housekeeping", using)):
        with guarded.atomic(using), connections[using].cursor() as cursor:
            cursor.execute(DELETE_ENDED)
        _update_no_code_since(using)
        _make_dead(using)
        if dead_for := conf.settings().consumer.dead_for:
            old = Deferred.objects.using(using).filter(dead_at__lt=Now() - dead_for)
            for _ in settle(old, Act.DISCARDED, by="housekeeping", reason='older than OUTBOX["CONSUMER"]["DEAD_FOR"]'):
                pass


def _update_no_code_since(using: str) -> None:
    with guarded.atomic(using), connections[using].cursor() as cursor:
        cursor.execute(READ_KINDS)
        kinds = cursor.fetchall()
        parameters: list[Any] = [LIVES_FOR]
        cursor.execute(READ_LIVE_SUBSCRIPTIONS, parameters)
        live = set(cursor.fetchall())
        has_code = [
            any((group, subscription) in live for subscription in matching_subscriptions(*kind)) for group, *kind in kinds
        ]
        if kinds:
            cursor.execute(UPDATE_NO_CODE_SINCE, [*map(list, zip(*kinds, strict=True)), has_code])


def _make_dead(using: str) -> None:
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
        cursor.execute(MAKE_DEAD, values)
        dead = cursor.fetchall()
    for group, message_id, topic in dead:
        fields = log_fields(message_id=message_id, topic=topic, group=group)
        logger.error("Message %s is a dead letter of group %r: %s", message_id, group, NO_CODE, extra=fields)
        signals.dead_lettered.send_robust(sender=tidy, group=group, message_id=message_id, topic=topic, reason=NO_CODE)
