"""
Who goes on next: three kinds of schedule, and the replay of a list of decisions.

- uniform: any actor that can, with equal chances;
- bursts: one actor for some steps, then another;
- preemptions (as in PCT): each actor has a priority, and the highest goes on; before a few random steps that are decisive the
  one that goes on becomes the lowest, as does one that finds nothing to do. Most errors need one to three such changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tests.explorer.scheduler import Actor, Decision, Fault

KINDS = ("uniform", "bursts", "preemptions")
WEIGHTS = (1, 1, 3)
EVENTS = ("time", "network", "operator")  # they act at random steps, in all kinds
BURST = 8  # steps on average
PREEMPTIONS = (1, 2, 2, 3)
CHANGES = 0.3  # the share of decisive steps before which another goes on, until the preemptions are used up
INDECISIVE = 0.2  # the chance that a fault that is due happens to a step that is not decisive
MOST_EVENTS = 6
LONG_STOP = 0.7  # the share of stops at which something happens meanwhile
TIME_PASSES = 0.75  # the share of these at which it is that time passes


class Seeded:
    """
    Decisions from a source of random numbers.

    Args:
        steps: how many there are, about: where faults and events are placed.
        faults: the most steps to which something happens.
    """

    def __init__(self, kind: str, random: Random, *, steps: int, faults: int) -> None:
        self._random = random
        self._length = steps
        self._choose = {"uniform": self._uniform, "bursts": self._burst, "preemptions": self._by_priority}[kind]
        self._steps = 0
        self._fault_at = self._places(faults)
        self._event_at = self._places(random.randint(1, MOST_EVENTS))
        self._changes = random.choice(PREEMPTIONS)
        self._current: str | None = None
        self._left = 0
        self._is_event = False  # the next step is that of an event, if there is one
        self._priorities: dict[str, float] = {}

    def choose(self, ready: Sequence[Actor]) -> Decision:
        """Return a decision."""
        events = [one for one in ready if one.name in EVENTS]
        others = [one for one in ready if one.name not in EVENTS]
        if self._event_at and self._steps >= self._event_at[0]:
            self._event_at.pop(0)
            self._is_event = True
        if events and (self._is_event or not others):
            self._is_event = False
            actor = self._event(events)
        else:
            actor = self._choose(others)
        self._steps += 1
        fault = Fault.NONE
        is_due = bool(self._fault_at) and self._steps > self._fault_at[0]
        if is_due and actor.step.faults and (actor.step.is_decisive or self._random.random() < INDECISIVE):
            self._fault_at.pop(0)
            fault = self._random.choice(actor.step.faults)
        return Decision(actor.name, fault)

    def _places(self, count: int) -> list[int]:
        return sorted(self._random.randrange(self._length) for _ in range(count))

    def _event(self, events: Sequence[Actor]) -> Actor:
        time = [one for one in events if one.name == "time"]
        return time[0] if time and self._random.random() < TIME_PASSES else self._random.choice(events)

    def _uniform(self, ready: Sequence[Actor]) -> Actor:
        return self._random.choice(ready)

    def _burst(self, ready: Sequence[Actor]) -> Actor:
        actor = next((one for one in ready if one.name == self._current), None)
        self._left -= 1
        if actor is None or self._left < 0:
            actor = self._random.choice(ready)
            self._current, self._left = actor.name, int(self._random.expovariate(1 / BURST))
            self._is_event = self._random.random() < LONG_STOP
        return actor

    def _by_priority(self, ready: Sequence[Actor]) -> Actor:
        for one in ready:
            self._priorities.setdefault(one.name, self._random.random())
            if one.is_idle:  # else it would look again and again before anyone else goes on
                one.is_idle = False
                self._priorities[one.name] = -float(self._steps)
        actor = max(ready, key=lambda one: self._priorities[one.name])
        if self._changes and actor.step.is_decisive and self._random.random() < CHANGES:
            self._changes -= 1
            self._priorities[actor.name] = -float(self._steps)
            self._is_event = self._random.random() < LONG_STOP
            actor = max(ready, key=lambda one: self._priorities[one.name])
        return actor


class Replayed:
    """
    Given decisions, as far as they can be followed; then each actor to its end, one after the other.

    A decision about an actor that is not there, or cannot go on, is skipped: so a list from which some were left out is a
    schedule, too.
    """

    def __init__(self, decisions: Sequence[Decision]) -> None:
        self._decisions = list(reversed(decisions))
        self._last = ""

    def choose(self, ready: Sequence[Actor]) -> Decision:
        """Return the next decision that can be followed."""
        by_name = {one.name: one for one in ready}
        while self._decisions:
            decision = self._decisions.pop()
            if (actor := by_name.get(decision.actor)) is not None:
                self._last = actor.name
                is_possible = decision.fault in actor.step.faults
                return decision if is_possible else Decision(actor.name)
        self._last = self._last if self._last in by_name else ready[0].name
        return Decision(self._last)
