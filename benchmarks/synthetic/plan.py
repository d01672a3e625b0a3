"""The plan of a synthetic history and of its faults, drawn on the driver from a seed, without Spark."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from outbox.pipeline.spark.findings import Breach, FindingKind, Stage

SOURCE = "urn:uuid:00000000-0000-4000-8000-000000000001"
GROUP = "group-{}".format

FAULTS = (
    (FindingKind.LOST, Stage.BUSINESS),  # an order without a message: the message never was
    (FindingKind.LOST, Stage.OUTBOX),
    (FindingKind.LOST, Stage.BROKER),
    (FindingKind.LOST, Stage.INBOX),
    (FindingKind.DUPLICATED, Stage.BROKER),
    (FindingKind.DUPLICATED, Stage.INBOX),
    (FindingKind.ORPHAN, Stage.BROKER),
    (FindingKind.ORPHAN, Stage.INBOX),
)


@dataclass(frozen=True)
class Plan:
    """
    Message n (from 0) goes to topic n % topics, lane n // topics % lanes, with the next number there.

    Args:
        lost, duplicated, orphans: so many in all, spread over the stages where that can happen, in bursts of up to `burst`
            neighbouring numbers.
        each_micros: the time from one message to the next.
    """

    messages: int
    lost: int = 0
    duplicated: int = 0
    orphans: int = 0
    topics: int = 4
    lanes: int = 2
    groups: int = 1
    burst: int = 20
    each_micros: int = 1_000
    seed: int = 1

    @property
    def streams(self) -> int:
        return self.topics * self.lanes

    def topic(self, n: int) -> str:
        return f"topic-{n % self.topics}"

    def lane(self, n: int) -> int:
        return n // self.topics % self.lanes

    def number(self, n: int) -> int:
        return n // self.streams + 1

    def last(self, topic: int, lane: int) -> int:
        """Return the last number of a lane."""
        return (self.messages - 1 - topic - lane * self.topics) // self.streams + 1


@dataclass(frozen=True)
class Truth:
    """The faults of the messages: (kind, stage) -> group ('' but for the inbox) -> messages n."""

    faults: dict[tuple[FindingKind, Stage], dict[str, list[int]]] = field(default_factory=dict)

    def of(self, kind: FindingKind, stage: Stage, group: str = "") -> list[int]:
        return self.faults.get((kind, stage), {}).get(group, [])


def draw(plan: Plan, faults: Sequence[tuple[FindingKind, Stage]] = FAULTS) -> Truth:
    """Choose the messages with faults, at most one fault each."""
    chance = random.Random(plan.seed)
    taken: set[int] = set()
    truth = Truth()
    for amount, kind in (
        (plan.lost, FindingKind.LOST),
        (plan.duplicated, FindingKind.DUPLICATED),
        (plan.orphans, FindingKind.ORPHAN),
    ):
        stages = [stage for fault, stage in faults if fault is kind]
        for place, stage in enumerate(stages):
            share = amount // len(stages) + (place < amount % len(stages))
            group = GROUP(chance.randrange(plan.groups)) if stage is Stage.INBOX else ""
            truth.faults.setdefault((kind, stage), {})[group] = sorted(_take(plan, chance, taken, share))
    return truth


def _take(plan: Plan, chance: random.Random, taken: set[int], amount: int) -> Iterator[int]:
    if amount > plan.messages - len(taken):
        raise ValueError(f"{plan.messages} messages are too few for so many faults.")
    while amount:
        start, length = chance.randrange(plan.messages), chance.randint(1, plan.burst)
        for n in range(start, min(plan.messages, start + length * plan.streams), plan.streams):
            if n not in taken and amount:
                taken.add(n)
                amount -= 1
                yield n


def expected(plan: Plan, truth: Truth) -> list[Breach]:
    """Return the expected findings of an audit, one finding for each number (`findings.merge` makes them ranges)."""
    found = []
    for (kind, stage), groups in truth.faults.items():
        for group, messages in groups.items():
            if stage is Stage.BUSINESS:
                continue  # told by `about`
            for n in messages:
                number = plan.number(n)
                found.append(Breach(kind, stage, plan.topic(n), SOURCE, plan.lane(n), group, "", number, number, 1))
    return found
