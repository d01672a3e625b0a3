"""Dead letters of the project's consumer groups: read from their brokers, delivered again or discarded by a person."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace

from outbox import conf
from outbox.brokers.base import DeadLetter
from outbox.brokers.capabilities import DeadLetters
from outbox.consuming import tries
from outbox.consuming.delivery_info import uuid_of
from outbox.consuming.outcome import Outcome
from outbox.consuming.register import Group, groups
from outbox.errors import BrokerUnavailable
from outbox.models import FailedDelivery

READ_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter and the broker that keeps it."""

    broker: str
    letter: DeadLetter

    @property
    def name(self) -> str:
        """What finds it again, in one text."""
        return json.dumps([self.broker, self.letter.group, self.letter.id, self.letter.message_id])


@dataclass(slots=True)
class Letters:
    """
    What the groups gave up, oldest first.

    Args:
        cut: groups of which only the oldest `READ_AT_ONCE` were read.
        troubles: why those of a group are not here.
    """

    found: list[Letter] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)


NO_RECORD = "Given up by the broker itself; no try that failed is on record here."


def read_letters() -> Letters:
    """Ask the brokers of all consumer groups for their dead letters."""
    letters = Letters()
    for group in groups().values():
        for alias in group.brokers:
            _read(letters, group, alias)
    letters.found.sort(key=lambda one: one.letter.died_at)
    return letters


def settle_letters(names: Iterable[str], *, discard: bool = False) -> Iterator[str]:
    """
    Deliver dead letters to their groups again, or discard them; return the names of those for which it was done.

    One after the other: what is not returned was settled by somebody else before. What is delivered again begins anew: nothing
    is counted of what its handler did before.

    Args:
        names: of `Letter`s, as `read_letters` gave them.

    Raises:
        BrokerUnavailable: a broker is out of reach; those given so far are settled.
    """
    known = groups()
    by_broker: dict[str, list[str]] = {}
    for name in names:
        by_broker.setdefault(json.loads(name)[0], []).append(name)
    for alias, chosen in by_broker.items():
        with closing(conf.make_broker(alias)) as broker:
            keeper = DeadLetters.of(broker)
            settle = keeper.discard if discard else keeper.replay
            for name in chosen:
                _, group, letter_id, message_id = json.loads(name)
                if group in known:
                    tries.forget(group, [uuid_of(message_id)], known[group].using)
                if settle(group, [letter_id]):
                    yield name


def _read(letters: Letters, group: Group, alias: str) -> None:
    if not conf.broker_class(alias).supports_replay:
        letters.troubles.append(
            f"The dead letters of group {group.name!r} stay with the broker {alias!r}, which does not list them."
        )
        return
    try:
        with closing(conf.make_broker(alias)) as broker:
            found = DeadLetters.of(broker).dead_letters(group.name, limit=READ_AT_ONCE)
    except BrokerUnavailable as error:
        letters.troubles.append(f"Group {group.name!r}: {str(error).strip()}")
        return
    letters.found.extend(Letter(alias, letter) for letter in _with_reasons(group, found))
    if len(found) == READ_AT_ONCE:
        letters.cut.append(group.name)


def _with_reasons(group: Group, found: list[DeadLetter]) -> list[DeadLetter]:
    """Return letters with a reason each: where the broker keeps none, the last try that failed, as we recorded it."""
    bare = [letter for letter in found if not letter.reason]
    if not bare:
        return found
    ids = [uuid_of(letter.message_id) for letter in bare]
    failed = FailedDelivery.objects.using(group.using).filter(consumer_group=group.name, message_id__in=ids).order_by("id")
    last = {(row.message_id, row.topic): row for row in failed.only("message_id", "topic", "nth", "outcome", "error")}
    return [
        letter if letter.reason else _explained(letter, last.get((uuid_of(letter.message_id), letter.topic))) for letter in found
    ]


def _explained(letter: DeadLetter, row: FailedDelivery | None) -> DeadLetter:
    if row is None:
        return replace(letter, reason=NO_RECORD)
    by = "" if row.outcome == Outcome.DEAD_LETTER else "given up by the broker itself, after its own limit; last: "
    return replace(letter, reason=f"{by}attempt {row.nth}: {row.error}", attempt=max(letter.attempt, row.nth))
