"""
Dead letters of the project's consumer groups: read from their brokers, replayed or discarded by an operator.

An operator's act is recorded before it is done, and confirmed after it (`OperatorAct`). A process that dies in between leaves
the state "asked", which means that the broker may or may not have done it. No act is without a row.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import datetime
from uuid import UUID

from django.db import connections, router, transaction

from outbox import conf, database
from outbox.brokers.base import BrokerDeadLetter
from outbox.brokers.capabilities import DeadLetters
from outbox.consuming.delivery_info import identity_of
from outbox.consuming.outcome import Outcome, forget_counts, shape_of
from outbox.consuming.owners import set_owner
from outbox.consuming.register import groups
from outbox.errors import BrokerUnavailable
from outbox.models import Act, FailedDelivery, OperatorAct

# The numbers with which the outbox sent messages.
PLACES = "SELECT s.id, o.id, s.lane, s.number FROM outbox_message_state s CROSS JOIN outbox_source o WHERE s.id = ANY(%s)"


DONE = {Act.REPLAY_ASKED: Act.REPLAYED, Act.DISCARD_ASKED: Act.DISCARDED}

# The last state of messages in the groups that gave them up and have not handled them since.
ENDS = """
SELECT DISTINCT ON (message_id, consumer_group) message_id, consumer_group, outcome, acted_by FROM (
    SELECT message_id, consumer_group, outcome, '' AS acted_by, failed_at AS at FROM outbox_failed_delivery
    WHERE message_id = ANY(%(ids)s) AND outcome = %(dead_letter)s
    UNION ALL
    SELECT message_id, consumer_group, act, acted_by, acted_at FROM outbox_operator_act
    WHERE message_id = ANY(%(ids)s) AND consumer_group <> ''
) given_up
WHERE NOT EXISTS (
    SELECT FROM outbox_inbox inbox
    WHERE inbox.message_id = given_up.message_id AND inbox.consumer_group = given_up.consumer_group)
ORDER BY message_id, consumer_group, at DESC
"""


@dataclass(frozen=True, slots=True)
class GroupEnd:
    """
    The last state of a message in a group that has not handled it.

    Args:
        outcome: "dead letter", or the last `Act`.
        by: the operator of that act; empty for a dead letter.
    """

    group: str
    outcome: str
    by: str


def note_asked(
    letters: Collection[tuple[BrokerDeadLetter, FailedDelivery | None]], act: Act, by: str, reason: str, using: str
) -> dict[str, int]:
    """
    Record that an operator is about to act on dead letters of a group; return letter id -> row id.

    The failures of the messages are counted from zero again.

    Args:
        letters: each with the group's last failure, which has the message's number. Without one the number is read from the
            outbox, if that is in this database.
        using: the database of the group's inbox.
    """
    ids = {letter.id: identity_of(letter.message_id, letter.source) for letter, _ in letters}
    places = _read_places([ids[letter.id] for letter, last in letters if last is None], using)
    rows = []
    for letter, last in letters:
        place = (last.source, last.lane, last.number) if last else places.get(ids[letter.id], ("", None, None))
        source, lane, number = place
        row = OperatorAct(
            consumer_group=letter.group,
            message_id=ids[letter.id],
            topic=letter.topic,
            delivery_count=letter.delivery_count,
            source=source,
            lane=lane,
            number=number,
            act=act,
            fingerprint=last.fingerprint if last else "",
            reason=reason,
            acted_by=by,
        )
        rows.append(row)
    with transaction.atomic(using):
        OperatorAct.objects.using(using).bulk_create(rows)
        for group in {letter.group for letter, _ in letters}:
            forget_counts(group, ids.values(), using)
    return {letter.id: row.pk for (letter, _), row in zip(letters, rows, strict=True)}


def _read_places(message_ids: list[UUID], using: str) -> dict[UUID, tuple[str, int | None, int | None]]:
    with connections[using].cursor() as cursor:
        cursor.execute(PLACES, [message_ids])
        return {message_id: (source, lane, number) for message_id, source, lane, number in cursor.fetchall()}


def note_done(asked: Mapping[str, int], settled: Collection[str], act: Act, using: str) -> None:
    """Record which acts were done, and delete the records of those without effect, because the letter was already gone."""
    rows = OperatorAct.objects.using(using)
    with transaction.atomic(using):
        rows.filter(pk__in=[row for letter, row in asked.items() if letter in settled]).update(act=DONE[act])
        rows.filter(pk__in=[row for letter, row in asked.items() if letter not in settled]).delete()


def read_ends(message_ids: Iterable[UUID], using: str) -> Mapping[UUID, list[GroupEnd]]:
    """Return the last state of messages in the groups that gave them up and have not handled them since."""
    found: dict[UUID, list[GroupEnd]] = {}
    with connections[using].cursor() as cursor:
        cursor.execute(ENDS, {"ids": list(message_ids), "dead_letter": Outcome.DEAD_LETTER})
        for message_id, *end in cursor.fetchall():
            found.setdefault(message_id, []).append(GroupEnd(*end))
    return found


READ_AT_ONCE = 1000  # for a page or a list
READ_TO_SETTLE = 50_000  # for a command that settles all that match
SETTLED_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class Letter:
    """
    A dead letter and the broker that keeps it.

    Args:
        using: the database of the group's inbox.
        last: the group's last recorded failure; None where none is recorded.
    """

    broker: str
    letter: BrokerDeadLetter
    using: str
    last: FailedDelivery | None = None

    @property
    def name(self) -> str:
        """A string that identifies the letter."""
        return json.dumps([self.broker, self.letter.group, self.letter.id, self.letter.message_id])

    @property
    def fingerprint(self) -> str:
        """A text that is equal for letters whose errors look alike."""
        return self.last.fingerprint if self.last and self.last.fingerprint else shape_of(self.letter.reason)


@dataclass(slots=True)
class Letters:
    """
    The dead letters of the groups, oldest first.

    Args:
        cut: groups that have more letters, of which only the oldest were read.
        troubles: why the letters of a group could not be read.
    """

    found: list[Letter] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)


@dataclass(slots=True)
class LetterGroup:
    """Dead letters of a group and topic whose errors look alike. `reason`: that of the oldest one."""

    group: str
    topic: str
    fingerprint: str
    reason: str
    first_at: datetime
    last_at: datetime
    count: int = 0


@dataclass(frozen=True, slots=True)
class _GroupBrokers:
    """A group, the database of its inbox, and the brokers that may keep letters of it."""

    group: str
    using: str
    brokers: tuple[str, ...]


NO_RECORD = "Given up by the broker itself; no failure is recorded here."


def read_letters(*, is_to_settle: bool = False) -> Letters:
    """
    Ask the brokers of all consumer groups for their dead letters, each for the oldest `READ_AT_ONCE` or `READ_TO_SETTLE`.

    Groups whose code was removed are asked about too, as long as a dead letter of theirs is recorded.
    """
    limit = READ_TO_SETTLE if is_to_settle else READ_AT_ONCE
    letters = Letters()
    for asked in _groups_to_ask():
        for alias in asked.brokers:
            _read(letters, asked, alias, limit)
    letters.found.sort(key=lambda one: one.letter.died_at)
    return letters


def groups_with_letters() -> list[str]:
    """Return the names of all groups that may have dead letters, also without code here."""
    return sorted({asked.group for asked in _groups_to_ask()})


def _groups_to_ask() -> Iterator[_GroupBrokers]:
    yield from (_GroupBrokers(group.name, group.using, tuple(group.brokers)) for group in groups().values())
    topics = conf.settings().topics
    home = router.db_for_write(FailedDelivery)
    homes = {home} if database.is_outbox_database(home) else set()
    for using in sorted(homes | {group.using for group in groups().values()}):
        brokers: dict[str, set[str]] = {}
        given_up = FailedDelivery.objects.using(using).filter(outcome=Outcome.DEAD_LETTER)
        for group, topic in given_up.order_by().values_list("consumer_group", "topic").distinct():
            if group not in groups() and topic in topics and conf.broker_class(topics[topic].broker).supports_replay:
                brokers.setdefault(group, set()).add(topics[topic].broker)
        yield from (_GroupBrokers(group, using, tuple(sorted(aliases))) for group, aliases in sorted(brokers.items()))


def group_letters(letters: Iterable[Letter]) -> list[LetterGroup]:
    """Group letters by group, topic and similar errors, the most frequent first."""
    found: dict[tuple[str, str, str], LetterGroup] = {}
    for one in letters:
        letter, key = one.letter, (one.letter.group, one.letter.topic, one.fingerprint)
        alike = found.setdefault(key, LetterGroup(*key, letter.reason, letter.died_at, letter.died_at))
        alike.count += 1
        alike.first_at, alike.last_at = min(alike.first_at, letter.died_at), max(alike.last_at, letter.died_at)
    return sorted(found.values(), key=lambda alike: (-alike.count, alike.group, alike.topic, alike.fingerprint))


def settle_letters(letters: Iterable[Letter], *, by: str, reason: str = "", discard: bool = False) -> Iterator[Letter]:
    """
    Replay or discard dead letters, a portion after the other; yield each letter that was settled.

    A letter that is not yielded was settled by another process before. The failures of a replayed message are counted from zero.
    Each act is recorded before it is done, so call this outside a transaction.

    Args:
        letters: from `read_letters`.
        by: who does it: a user name, or a command and the user who ran it.
        reason: why, in the operator's words.

    Raises:
        BrokerUnavailable: a broker cannot be reached. The letters yielded so far are settled; of the next `SETTLED_AT_ONCE` some
            may be.
    """
    act = Act.DISCARD_ASKED if discard else Act.REPLAY_ASKED
    chosen: dict[str, dict[tuple[str, str], list[Letter]]] = {}
    for one in letters:
        chosen.setdefault(one.broker, {}).setdefault((one.letter.group, one.using), []).append(one)
    for alias, by_group in chosen.items():
        with closing(conf.make_broker(alias)) as broker:
            store = DeadLetters.of(broker)
            settle = store.discard if discard else store.replay
            for (group, using), found in by_group.items():
                set_owner(broker, group, using)
                for portion in (found[at : at + SETTLED_AT_ONCE] for at in range(0, len(found), SETTLED_AT_ONCE)):
                    asked = note_asked([(one.letter, one.last) for one in portion], act, by, reason, using)
                    settled = settle(group, [one.letter.id for one in portion])
                    note_done(asked, settled, act, using)
                    yield from (one for one in portion if one.letter.id in settled)


def _read(letters: Letters, asked: _GroupBrokers, alias: str, limit: int) -> None:
    if not conf.broker_class(alias).supports_replay:
        letters.troubles.append(
            f"The dead letters of group {asked.group!r} stay with the broker {alias!r}, which does not list them."
        )
        return
    try:
        with closing(conf.make_broker(alias)) as broker:
            set_owner(broker, asked.group, asked.using)
            found = DeadLetters.of(broker).dead_letters(asked.group, limit=limit)
    except BrokerUnavailable as error:
        letters.troubles.append(f"Group {asked.group!r}: {str(error).strip()}")
        return
    letters.found.extend(_with_failures(asked, alias, found))
    if len(found) == limit:
        letters.cut.append(asked.group)


def _with_failures(asked: _GroupBrokers, alias: str, found: list[BrokerDeadLetter]) -> Iterator[Letter]:
    """Yield letters with their last recorded failure, and with its reason where the broker keeps none."""
    rows = FailedDelivery.objects.using(asked.using).filter(
        consumer_group=asked.group,
        message_id__in=[identity_of(letter.message_id, letter.source) for letter in found],
        outcome__in=[Outcome.RETRY, Outcome.DEAD_LETTER],
    )
    last = {(row.message_id, row.topic): row for row in rows.defer("traceback").order_by("id")} if found else {}
    for letter in found:
        row = last.get((identity_of(letter.message_id, letter.source), letter.topic))
        yield Letter(alias, letter if letter.reason else _explained(letter, row), asked.using, row)


def _explained(letter: BrokerDeadLetter, row: FailedDelivery | None) -> BrokerDeadLetter:
    if row is None:
        return replace(letter, reason=NO_RECORD)
    by = "" if row.outcome == Outcome.DEAD_LETTER else "given up by the broker itself, after its own limit; last: "
    delivery_count = max(letter.delivery_count, row.delivery_count)
    return replace(letter, reason=f"{by}delivery {row.delivery_count}: {row.error}", delivery_count=delivery_count)
