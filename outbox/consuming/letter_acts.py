"""
Acts of operators on dead letters, in the table of failed deliveries: recorded before the act, confirmed after it.

A process that dies in between leaves the state "asked", which means that the broker may or may not have done it. No act is
without a row.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from uuid import UUID

from django.db import connections
from django.db.models import Exists, OuterRef

from outbox.brokers.base import DeadLetter
from outbox.consuming.delivery_info import uuid_of
from outbox.consuming.outcome import Outcome
from outbox.models import FailedDelivery, Inbox

# The number with which the outbox sent a message.
PLACE = "SELECT o.id, s.lane, s.number FROM outbox_message_state s CROSS JOIN outbox_source o WHERE s.id = %s"


class LetterAct(enum.StrEnum):
    """An operator's act on a dead letter, in the same column as `Outcome`."""

    REPLAY_ASKED = "replay asked"
    REPLAYED = "replayed"
    DISCARD_ASKED = "discard asked"
    DISCARDED = "discarded"


ENDS = (str(Outcome.DEAD_LETTER), *map(str, LetterAct))
DONE = {LetterAct.REPLAY_ASKED: LetterAct.REPLAYED, LetterAct.DISCARD_ASKED: LetterAct.DISCARDED}


@dataclass(frozen=True, slots=True)
class GroupEnd:
    """
    The last state of a message in a group that has not handled it.

    Args:
        outcome: "dead letter", or the last `LetterAct`.
        by: the operator of that act; empty for a dead letter.
    """

    group: str
    outcome: str
    by: str


def note_asked(letter: DeadLetter, last: FailedDelivery | None, *, act: LetterAct, by: str, reason: str, using: str) -> int:
    """
    Record that an operator is about to act on a dead letter; return the row's id.

    Args:
        last: the group's last try, which has the message's number. Without one the number is read from the outbox, if that is in
            this database.
        using: the database of the group's inbox.
    """
    message_id = uuid_of(letter.message_id)
    source, lane, number = (last.source, last.lane, last.number) if last else _read_place(message_id, using)
    row = FailedDelivery.objects.using(using).create(
        consumer_group=letter.group,
        message_id=message_id,
        topic=letter.topic,
        nth=letter.attempt,
        source=source,
        lane=lane,
        number=number,
        outcome=act,
        fingerprint=last.fingerprint if last else "",
        error=reason,
        acted_by=by,
    )
    return row.pk


def _read_place(message_id: UUID, using: str) -> tuple[str, int | None, int | None]:
    with connections[using].cursor() as cursor:
        cursor.execute(PLACE, [message_id])
        return cursor.fetchone() or ("", None, None)


def confirm(row_id: int, act: LetterAct, using: str) -> None:
    """Record that the act was done."""
    FailedDelivery.objects.using(using).filter(pk=row_id).update(outcome=DONE[act])


def withdraw(row_id: int, using: str) -> None:
    """Delete the record of an act that had no effect, because the letter was already gone."""
    FailedDelivery.objects.using(using).filter(pk=row_id).delete()


def read_ends(message_ids: Iterable[UUID], using: str) -> Mapping[UUID, list[GroupEnd]]:
    """Return the last state of messages in the groups that gave them up and have not handled them since."""
    handled = Inbox.objects.using(using).filter(message_id=OuterRef("message_id"), consumer_group=OuterRef("consumer_group"))
    rows = (
        FailedDelivery.objects.using(using)
        .filter(message_id__in=list(message_ids), outcome__in=ENDS)
        .exclude(Exists(handled))
        .order_by("message_id", "consumer_group", "-id")
        .distinct("message_id", "consumer_group")
    )
    found: dict[UUID, list[GroupEnd]] = {}
    for row in rows.only("message_id", "consumer_group", "outcome", "acted_by"):
        found.setdefault(row.message_id, []).append(GroupEnd(row.consumer_group, row.outcome, row.acted_by))
    return found
