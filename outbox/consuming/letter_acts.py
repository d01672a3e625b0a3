"""
Acts of operators on dead letters, in the table of failed deliveries: recorded before the act, confirmed after it.

A process that dies in between leaves the state "asked", which means that the broker may or may not have done it. No act is
without a row.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from uuid import UUID

from django.db import connections, transaction
from django.db.models import Exists, OuterRef

from outbox.brokers.base import DeadLetter
from outbox.consuming import tries
from outbox.consuming.delivery_info import identity_of
from outbox.consuming.outcome import Outcome
from outbox.models import FailedDelivery, Inbox

# The numbers with which the outbox sent messages.
PLACES = "SELECT s.id, o.id, s.lane, s.number FROM outbox_message_state s CROSS JOIN outbox_source o WHERE s.id = ANY(%s)"


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


def note_asked(
    letters: Collection[tuple[DeadLetter, FailedDelivery | None]], act: LetterAct, by: str, reason: str, using: str
) -> dict[str, int]:
    """
    Record that an operator is about to act on dead letters of a group; return letter id -> row id.

    The failures of the messages are counted from zero again.

    Args:
        letters: each with the group's last try, which has the message's number. Without one the number is read from the outbox,
            if that is in this database.
        using: the database of the group's inbox.
    """
    ids = {letter.id: identity_of(letter.message_id, letter.source) for letter, _ in letters}
    places = _read_places([ids[letter.id] for letter, last in letters if last is None], using)
    rows = []
    for letter, last in letters:
        place = (last.source, last.lane, last.number) if last else places.get(ids[letter.id], ("", None, None))
        source, lane, number = place
        row = FailedDelivery(
            consumer_group=letter.group,
            message_id=ids[letter.id],
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
        rows.append(row)
    with transaction.atomic(using):
        FailedDelivery.objects.using(using).bulk_create(rows)
        for group in {letter.group for letter, _ in letters}:
            tries.forget(group, ids.values(), using)
    return {letter.id: row.pk for (letter, _), row in zip(letters, rows, strict=True)}


def _read_places(message_ids: list[UUID], using: str) -> dict[UUID, tuple[str, int | None, int | None]]:
    with connections[using].cursor() as cursor:
        cursor.execute(PLACES, [message_ids])
        return {message_id: (source, lane, number) for message_id, source, lane, number in cursor.fetchall()}


def end(asked: Mapping[str, int], settled: Collection[str], act: LetterAct, using: str) -> None:
    """Record which acts were done, and delete the records of those without effect, because the letter was already gone."""
    rows = FailedDelivery.objects.using(using)
    with transaction.atomic(using):
        rows.filter(pk__in=[row for letter, row in asked.items() if letter in settled]).update(outcome=DONE[act])
        rows.filter(pk__in=[row for letter, row in asked.items() if letter not in settled]).delete()


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
