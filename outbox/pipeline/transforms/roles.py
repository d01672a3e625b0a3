"""
The roles in which a number can be seen: where, and how it stands there. What counts of a role is its set of numbers.

A role travels as a small integer, so that one aggregation serves all stages and groups at once.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pyspark.sql import Column
from pyspark.sql import functions as F

from outbox.pipeline.config import Group


class Seen(enum.IntEnum):
    """Roles of stages that are there once. Young: not older than the settle time."""

    SENT = 0
    SENT_YOUNG = 1
    OPEN = 2  # claimed, prepared or released, young
    OPEN_LATE = 3
    GONE = 4  # dead or skipped: explains why nothing follows
    STORED = 5  # at the broker
    STORED_YOUNG = 6
    FOREIGN_GROUP = 7  # in the inbox of a group that owes nothing
    NO_NUMBER_PLACE = 8
    NO_NUMBER_BROKER = 9
    NO_NUMBER_INBOX = 10
    UNSEEN = 11  # sent before the recorder began: what it has not written down may have been there all the same
    UNREAD = 12  # sent, not young, and the recorder has not come so far


class InGroup(enum.IntEnum):
    """Roles that each group has."""

    HANDLED = 0
    DEAD_LETTER = 1
    WAITING = 2  # being retried, or not yet read: the broker still has it for the group
    FILTERED = 3  # of a tag that the group did not ask for


FIRST_OF_GROUPS = 16
MAX_GROUPS = (1024 - FIRST_OF_GROUPS) // len(InGroup)

SENT_OF = frozenset({Seen.SENT, Seen.SENT_YOUNG, Seen.UNSEEN, Seen.UNREAD})
PLACES_OF = SENT_OF | {Seen.OPEN, Seen.OPEN_LATE, Seen.GONE}
BROKERS_OF = frozenset({Seen.STORED, Seen.STORED_YOUNG})


def of_group(group: int, role: InGroup) -> int:
    """Give the integer of a group's role; groups count from 0."""
    return FIRST_OF_GROUPS + group * len(InGroup) + role


@dataclass(frozen=True)
class Reach:
    """
    How far a recorded topic can be judged at the broker, in microseconds.

    Args:
        began, until: when what was sent between them was shown, it is recorded, if the broker has it.
        hidden: a message may be shown so much later than it was sent.
    """

    began: int
    until: int
    hidden: int


@dataclass(frozen=True)
class Roles:
    """How rows become roles, for the groups that owe something. reaches: of recorded topics."""

    groups: Sequence[Group]
    cutoff_micros: int
    reaches: Mapping[str, Reach] = field(default_factory=dict)

    def of_sent(self) -> Column:
        """Takes topic, claimed_at, at of a place that was sent; gives its role."""
        at = F.unix_micros(F.coalesce("at", "claimed_at"))
        young, sent = F.lit(int(Seen.SENT_YOUNG)), F.lit(int(Seen.SENT))
        role = F.when(at <= self.cutoff_micros, sent).otherwise(young)
        for topic, reach in self.reaches.items():
            recorded = (
                F.when(at > self.cutoff_micros, young)
                .when(at < reach.began, int(Seen.UNSEEN))
                .when(at > reach.until, int(Seen.UNREAD))
                .when(at > reach.until - reach.hidden, young)
                .otherwise(sent)
            )
            role = F.when(F.col("topic") == topic, recorded).otherwise(role)
        return role

    def of_places(self) -> Column:
        """Takes topic, state, claimed_at, at; gives the role of a place."""
        is_long_open = F.unix_micros(F.coalesce("claimed_at", "at")) <= self.cutoff_micros
        state = F.col("state")
        return (
            F.when(state == "sent", self.of_sent())
            .when(state.isin("dead", "skipped"), int(Seen.GONE))
            .otherwise(F.when(is_long_open, int(Seen.OPEN_LATE)).otherwise(int(Seen.OPEN)))
        )

    def of_broker(self) -> Column:
        """Takes at; gives the role of a stored message."""
        return F.when(F.unix_micros("at") <= self.cutoff_micros, int(Seen.STORED)).otherwise(int(Seen.STORED_YOUNG))

    def of_inbox(self) -> Column:
        """Takes consumer_group; gives the role of an inbox row."""
        return self._by_group(InGroup.HANDLED)

    def of_attempts(self) -> Column:
        """Takes consumer_group, outcome; NULL where the row explains nothing."""
        dead, waiting = self._by_group(InGroup.DEAD_LETTER), self._by_group(InGroup.WAITING)
        outcome = F.col("outcome")
        role = F.when(outcome == "dead letter", dead).when(outcome.isin("waiting", "retry"), waiting)
        return F.when(role == int(Seen.FOREIGN_GROUP), F.lit(None)).otherwise(role)

    def of_filtered(self) -> list[Column]:
        """Takes topic, tag; gives a role for each group that a stored message was not meant for, else NULL."""
        found = []
        for number, group in enumerate(self.groups):
            for topic, tags in group.topics.items():
                if tags is not None:
                    is_filtered = (F.col("topic") == topic) & ~F.coalesce(F.col("tag").isin(tags), F.lit(False))
                    found.append(F.when(is_filtered, of_group(number, InGroup.FILTERED)))
        return found

    def _by_group(self, role: InGroup) -> Column:
        found = F.lit(int(Seen.FOREIGN_GROUP))
        for number, group in enumerate(self.groups):
            found = F.when(F.col("consumer_group") == group.name, of_group(number, role)).otherwise(found)
        return found
