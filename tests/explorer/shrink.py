"""Make a failing schedule short: fewer actors, orders and rounds, fewer faults, fewer changes of the actor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from tests.explorer.clock import real_monotonic
from tests.explorer.scheduler import Decision
from tests.explorer.schedules import Plan, Result, replay


def kinds(problems: Sequence[str]) -> frozenset[str]:
    """Return the kinds of problems, without what they are about."""
    return frozenset(one.partition(":")[0] for one in problems)


class Shrinker:
    """
    Shrinks one failing schedule.

    Args:
        seconds: of real time, after which the shortest schedule found so far is returned.
    """

    def __init__(self, failed: Result, *, seed: int, seconds: float = 60.0) -> None:
        self.best = failed
        self.runs = 0
        self._seed = seed
        self._wanted = kinds(failed.problems)
        self._until = real_monotonic() + seconds

    def shrink(self) -> Result:
        """Return the shortest schedule found that has a problem of the same kind."""
        cost = None
        while cost != self._cost() and not self._is_over():
            cost = self._cost()
            for leave_out in (self._plans, self._faults, self._decisions):
                leave_out()
        return self.best

    def _is_over(self) -> bool:
        return real_monotonic() > self._until

    def _cost(self) -> int:
        """Return how long the best trace is, and how often another actor goes on in it."""
        names = [decision.actor for decision in self.best.trace.decisions]
        return len(names) + sum(one != other for one, other in pairwise(names))

    def _try(self, plan: Plan, decisions: Sequence[Decision]) -> bool:
        self.runs += 1
        result = replay(plan, decisions, seed=self._seed)
        if not self._wanted & kinds(result.problems):
            return False
        self.best = result
        return True

    def _plans(self) -> None:
        """Leave actors and orders out, one by one."""
        tried: set[Plan] = set()
        while not self._is_over():
            candidate = next((one for one in _smaller(self.best.plan) if one not in tried), None)
            if candidate is None:
                return
            tried.add(candidate)
            self._try(candidate, self.best.trace.decisions)

    def _faults(self) -> None:
        """Leave faults out, one by one."""
        for place, decision in reversed(list(enumerate(self.best.trace.decisions))):
            decisions = self.best.trace.decisions
            if decision.fault and place < len(decisions) and not self._is_over():
                self._try(self.best.plan, [*decisions[:place], Decision(decision.actor), *decisions[place + 1 :]])

    def _decisions(self) -> None:
        """Leave parts of the decisions out: an actor then goes on until it ends."""
        decisions = list(self.best.trace.decisions)
        size = len(decisions) // 2
        while size and not self._is_over():
            start = 0
            while start < len(decisions) and not self._is_over():
                candidate = decisions[:start] + decisions[start + size :]
                if self._try(self.best.plan, candidate):
                    decisions = candidate
                else:
                    start += size
            size //= 2


def _smaller(plan: Plan) -> Iterator[Plan]:
    with_orders = {name for name, orders in plan.orders if orders}  # without it they would be placed before the trace begins
    for name in (one for one in plan.actors if one not in with_orders):
        yield replace(plan, actors=tuple(one for one in plan.actors if one != name))
    for name, orders in plan.orders:
        for order in orders:
            left = tuple(one for one in orders if one is not order)
            yield replace(plan, orders=tuple((one, left if one == name else theirs) for one, theirs in plan.orders))
    if plan.rounds > 1:
        yield replace(plan, rounds=plan.rounds - 1)
    for place in range(len(plan.passes)):
        yield replace(plan, passes=plan.passes[:place] + plan.passes[place + 1 :])
