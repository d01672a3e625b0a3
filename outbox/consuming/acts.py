"""
What operators do with deferred messages (*acts*): replay, retry now, hold, discard. Source: docs/explanation/deliveries.md.

An act is carried out in portions of at most 500 messages. Each portion is one transaction, which also records the act in
`outbox_operator_act`. Locked rows are skipped: a run or another operator has locked them.
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

PORTION = 500  # messages in one transaction, which holds an advisory lock for each message that it discards


class DeferredState(enum.StrEnum):
    """
    The states of deferred messages.

    A message has one of the states due, waiting, asleep, held and dead. Unless it is dead, it may also be running, in doubt, or
    without a handler.
    """

    DUE = "due"
    WAITING = "waiting"  # until the time of its next run
    ASLEEP = "asleep"  # until the earlier messages of its key have ended
    RUNNING = "running"
    HELD = "held"  # by an operator
    IN_DOUBT = "in doubt"  # it may have killed a process: the end of a run is not recorded, or the message was redelivered
    NO_HANDLER = "no handler"  # in any live process, as the housekeeping has found
    DEAD = "dead"


_IS_RUNNING = Exists(
    Process.objects.annotate(handled_id=KT("handling__message_id")).filter(
        kind="consumer", consumer_group=OuterRef("consumer_group"), handled_id=OuterRef("own_id")
    )
)
STATES: dict[DeferredState, Q] = {
    DeferredState.DUE: Q(dead_at=None, due_at__lte=Now()),
    DeferredState.WAITING: Q(dead_at=None, due_at__gt=Now(), due_at__lt=HELD),
    DeferredState.ASLEEP: Q(dead_at=None, due_at=None),
    DeferredState.RUNNING: Q(_IS_RUNNING, dead_at=None),
    DeferredState.HELD: Q(dead_at=None, due_at__gte=HELD),
    DeferredState.IN_DOUBT: Q(dead_at=None, crashes__gt=0),
    DeferredState.NO_HANDLER: Q(dead_at=None, no_code_since__isnull=False),
    DeferredState.DEAD: Q(dead_at__isnull=False),
}

# APPLIES: the messages that an act can be carried out on. CHANGES: the columns that it sets; a discard deletes the rows instead.
APPLIES: dict[Act, Q] = {
    Act.REPLAYED: STATES[DeferredState.DEAD],
    Act.RETRIED_NOW: Q(dead_at=None) & (Q(due_at__gt=Now()) | Q(no_code_since__isnull=False)),
    Act.HELD: Q(dead_at=None) & ~STATES[DeferredState.HELD],
    Act.DISCARDED: Q(),
}
_MAKE_DUE: dict[str, Any] = {"due_at": Now(), "no_code_since": None}
CHANGES: dict[Act, dict[str, Any]] = {
    Act.REPLAYED: {**_MAKE_DUE, "dead_at": None, "failures": 0, "crashes": 0, "runs": F("runs") + 1},
    Act.RETRIED_NOW: _MAKE_DUE,
    Act.HELD: {"due_at": HELD},
}

# Lock the keys of messages until the end of the transaction; return the messages that no process of their group is handling.
LOCK_FREE = f"""
SELECT id FROM unnest(%s::bigint[], %s::text[], %s::text[]) AS chosen (id, consumer_group, idempotency_key)
WHERE pg_try_advisory_xact_lock({Lock.INBOX}, hashtext(consumer_group || ' ' || idempotency_key))
"""

# Make the first deferred message of each order key due, if it is asleep: the message that it waited for may have ended.
WAKE = """
UPDATE outbox_deferred SET due_at = clock_timestamp() WHERE due_at IS NULL AND dead_at IS NULL AND id IN (
    SELECT first.id FROM unnest(%s::text[]) AS key (order_key), LATERAL (
        SELECT id FROM outbox_deferred d WHERE d.order_key = key.order_key AND dead_at IS NULL ORDER BY id LIMIT 1) first)
"""

UNUSED_COLUMNS = ("headers", "body")  # not loaded, since they may be large


def deferred_databases() -> list[str]:
    """Return the databases that may have deferred messages: those of this project's groups, and where routers put `Deferred`."""
    home = router.db_for_write(Deferred)
    return sorted({*([home] if database.is_outbox_database(home) else []), *(group.using for group in groups().values())})


def settle(
    rows: QuerySet[Deferred], act: Act, *, by: str, reason: str = "", limit: int | None = None
) -> Iterator[list[Deferred]]:
    """
    Carry out an act on deferred messages, portion by portion; yield the messages of each portion on which it was carried out.

    Call this outside a transaction, so that each portion is committed before it is yielded.

    Args:
        rows: messages of one database. Those that the act does not apply to are skipped.
        by: who does it: a user name, or a command and the user who ran it.
        reason: why, in the operator's words.
        limit: the maximum number of messages; the messages that were deferred first are taken.
    """
    ids = list(rows.filter(APPLIES[act]).order_by("id").values_list("id", flat=True)[:limit])
    for start in range(0, len(ids), PORTION):
        yield _act_on_portion(rows.db, ids[start : start + PORTION], act, by, reason)


def _act_on_portion(using: str, ids: Collection[int], act: Act, by: str, reason: str) -> list[Deferred]:
    rows = Deferred.objects.using(using)
    with guarded.atomic(using):
        chosen = rows.filter(APPLIES[act], id__in=ids).order_by("id").select_for_update(skip_locked=True, of=("self",))
        done = list(chosen.defer(*UNUSED_COLUMNS))
        if act is Act.DISCARDED:
            done = _move_to_inbox(done, using)
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


def _move_to_inbox(rows: list[Deferred], using: str) -> list[Deferred]:
    """Move messages to the inbox, so that later copies are dropped; skip those that are being handled. Return the moved ones."""
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


# The states of messages in the groups that have deferred or discarded them, and not handled them.
READ_GROUP_STATES = """
SELECT message_id, consumer_group, CASE WHEN dead_at IS NOT NULL THEN 'dead letter' ELSE 'deferred' END, ''
FROM outbox_deferred WHERE message_id = ANY(%(ids)s)
UNION ALL
SELECT message_id, consumer_group, act, acted_by FROM outbox_operator_act
WHERE message_id = ANY(%(ids)s) AND consumer_group <> '' AND act = 'discarded'
ORDER BY 1, 2
"""


# A group that has not handled a message; "deferred", "dead letter" or "discarded"; the operator who discarded it.
GroupState = tuple[str, str, str]


def read_group_states(message_ids: Iterable[UUID], using: str) -> Mapping[UUID, list[GroupState]]:
    """Return the states of messages in the groups of a database that have deferred or discarded them."""
    states: dict[UUID, list[GroupState]] = {}
    with connections[using].cursor() as cursor:
        cursor.execute(READ_GROUP_STATES, {"ids": list(message_ids)})
        for message_id, group, outcome, by in cursor.fetchall():
            states.setdefault(message_id, []).append((group, outcome, by))
    return states
