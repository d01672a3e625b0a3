"""
What operators do about deferred messages: replay, retry now, hold, discard. Source: docs/explanation/deliveries.md.

Each act on a portion of messages is one transaction with its rows of `outbox_operator_act`. A row that is locked belongs to a run
or to another operator, and is left out.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any
from uuid import UUID

from django.db import connections, router
from django.db.models import Exists, F, OuterRef, Q, QuerySet
from django.db.models.fields.json import KT
from django.db.models.functions import Now

from outbox import database
from outbox.consuming.deferred import HELD
from outbox.consuming.register import groups
from outbox.database import guarded
from outbox.database.locks import Lock
from outbox.models import Act, Deferred, Inbox, OperatorAct, Process

PORTION = 500  # in one transaction; each discarded message holds a lock until its end


class DeferredState(enum.StrEnum):
    """The states of deferred messages. Only due, waiting, asleep, held and dead exclude each other."""

    DUE = "due"
    WAITING = "waiting"  # for a later time
    ASLEEP = "asleep"  # behind an earlier message of its key
    RUNNING = "running"
    HELD = "held"  # by an operator
    IN_DOUBT = "in doubt"  # a run was begun, and never ended
    DEAD = "dead"


_IS_RUN = Exists(
    Process.objects.annotate(handled_id=KT("handling__message_id")).filter(
        kind="consumer", consumer_group=OuterRef("consumer_group"), handled_id=OuterRef("own_id")
    )
)
STATES: dict[DeferredState, Q] = {
    DeferredState.DUE: Q(dead_at=None, due_at__lte=Now()),
    DeferredState.WAITING: Q(dead_at=None, due_at__gt=Now(), due_at__lt=HELD),
    DeferredState.ASLEEP: Q(dead_at=None, due_at=None),
    DeferredState.RUNNING: Q(_IS_RUN, dead_at=None),
    DeferredState.HELD: Q(dead_at=None, due_at__gte=HELD),
    DeferredState.IN_DOUBT: Q(dead_at=None, crashes__gt=0),
    DeferredState.DEAD: Q(dead_at__isnull=False),
}

# Which messages an act is for, and the columns that it changes; a discard deletes the rows.
APPLIES: dict[Act, Q] = {
    Act.REPLAYED: STATES[DeferredState.DEAD],
    Act.RETRIED_NOW: Q(dead_at=None) & (Q(due_at__gt=Now()) | Q(no_code_since__isnull=False)),
    Act.HELD: Q(dead_at=None) & ~STATES[DeferredState.HELD],
    Act.DISCARDED: Q(),
}
_NOW: dict[str, Any] = {"due_at": Now(), "no_code_since": None}
CHANGES: dict[Act, dict[str, Any]] = {
    Act.REPLAYED: {**_NOW, "dead_at": None, "failures": 0, "crashes": 0, "runs": F("runs") + 1},
    Act.RETRIED_NOW: _NOW,
    Act.HELD: {"due_at": HELD},
}

# The messages that no handler of their groups is at work on, each locked until the end of the transaction.
LOCK_FREE = f"""
SELECT id FROM unnest(%s::bigint[], %s::text[], %s::text[]) AS chosen (id, consumer_group, idempotency_key)
WHERE pg_try_advisory_xact_lock({Lock.INBOX}, hashtext(consumer_group || ' ' || idempotency_key))
"""

# Wakes the first message of each key.
WAKE = """
UPDATE outbox_deferred SET due_at = clock_timestamp() WHERE due_at IS NULL AND dead_at IS NULL AND id IN (
    SELECT first.id FROM unnest(%s::text[]) AS key (order_key), LATERAL (
        SELECT id FROM outbox_deferred d WHERE d.order_key = key.order_key AND dead_at IS NULL ORDER BY id LIMIT 1) first)
"""

NOT_READ = ("headers", "body")


def deferred_databases() -> list[str]:
    """Return the databases that may have deferred messages: those of groups here, and that of the outbox."""
    home = router.db_for_write(Deferred)
    return sorted({*([home] if database.is_outbox_database(home) else []), *(group.using for group in groups().values())})


def settle(
    rows: QuerySet[Deferred], act: Act, *, by: str, reason: str = "", limit: int | None = None
) -> Iterator[list[Deferred]]:
    """
    Do an act about deferred messages, a portion after the other; yield those of each portion about which it was done.

    Call this outside a transaction, so that each portion is committed before it is yielded.

    Args:
        rows: of one database. Those that the act is not for are left out.
        by: who does it: a user name, or a command and the user who ran it.
        reason: why, in the operator's words.
        limit: the maximum number of messages; the oldest are taken.
    """
    ids = list(rows.filter(APPLIES[act]).order_by("id").values_list("id", flat=True)[:limit])
    for at in range(0, len(ids), PORTION):
        yield _settle(rows.db, ids[at : at + PORTION], act, by, reason)


def _settle(using: str, ids: Collection[int], act: Act, by: str, reason: str) -> list[Deferred]:
    rows = Deferred.objects.using(using)
    with guarded.atomic(using):
        chosen = rows.filter(APPLIES[act], id__in=ids).order_by("id").select_for_update(skip_locked=True, of=("self",))
        done = list(chosen.defer(*NOT_READ))
        if act is Act.DISCARDED:
            done = _end(done, using)
        else:
            rows.filter(id__in=[row.id for row in done]).update(**CHANGES[act])
        OperatorAct.objects.using(using).bulk_create(
            OperatorAct(
                act=act,
                message_id=row.message_id,
                topic=row.topic,
                consumer_group=row.consumer_group,
                delivery_count=row.delivery_count + row.runs,
                fingerprint=row.fingerprint,
                reason=reason,
                acted_by=by,
            )
            for row in done
        )
        with connections[using].cursor() as cursor:
            cursor.execute(WAKE, [sorted({row.order_key for row in done if row.order_key})])
    return done


def _end(rows: list[Deferred], using: str) -> list[Deferred]:
    """Move messages to the inbox, so that a late delivery is known; return those that are not handled at this moment."""
    with connections[using].cursor() as cursor:
        cursor.execute(LOCK_FREE, [[getattr(row, name) for row in rows] for name in ("id", "consumer_group", "idempotency_key")])
        free = {row[0] for row in cursor.fetchall()}
    done = [row for row in rows if row.id in free]
    columns = ("consumer_group", "idempotency_key", "message_id", "source", "topic", "lane", "number")
    Inbox.objects.using(using).bulk_create(
        (Inbox(delivery_count=0, **{name: getattr(row, name) for name in columns}) for row in done), ignore_conflicts=True
    )
    Deferred.objects.using(using).filter(id__in=free).delete()
    return done


# What became of messages in the groups that have not handled them.
ENDS = """
SELECT message_id, consumer_group, CASE WHEN dead_at IS NOT NULL THEN 'dead letter' ELSE 'deferred' END, ''
FROM outbox_deferred WHERE message_id = ANY(%(ids)s)
UNION ALL
SELECT message_id, consumer_group, act, acted_by FROM outbox_operator_act
WHERE message_id = ANY(%(ids)s) AND consumer_group <> '' AND act = 'discarded'
ORDER BY 1, 2
"""


# A group that has not handled a message; "deferred", "dead letter" or "discarded"; the operator who discarded it.
GroupEnd = tuple[str, str, str]


def read_ends(message_ids: Iterable[UUID], using: str) -> Mapping[UUID, list[GroupEnd]]:
    """Return what became of messages in the groups of a database that know and have not handled them."""
    ends: dict[UUID, list[GroupEnd]] = {}
    with connections[using].cursor() as cursor:
        cursor.execute(ENDS, {"ids": list(message_ids)})
        for message_id, group, outcome, by in cursor.fetchall():
            ends.setdefault(message_id, []).append((group, outcome, by))
    return ends
