"""The result of a measurement, and its text."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """
    One figure beside its bound.

    Args:
        value: what our code did, in `unit`.
        bound: what it is compared with, measured in the same run; None where the target is absolute.
        target: the ratio (or the value, where there is no bound) to reach; None where it is only told.
        at_most: True when less is better.
    """

    name: str
    value: float
    unit: str
    target: float | None
    at_most: bool
    bound: float | None = None
    note: str = ""

    @property
    def reached(self) -> float:
        return self.value if self.bound is None else self.value / self.bound

    @property
    def is_met(self) -> bool:
        if self.target is None:
            return True
        return self.reached <= self.target if self.at_most else self.reached >= self.target

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": None if self.bound is None else self.reached, "is_met": self.is_met}


def interleaved(rounds: int, *subjects: Callable[[], float]) -> list[float]:
    """Run the subjects in turn, `rounds` times each, and return the median of each: noise affects all alike."""
    seen: list[list[float]] = [[] for _ in subjects]
    for _ in range(rounds):
        for subject, found in zip(subjects, seen, strict=True):
            found.append(subject())
    return [statistics.median(found) for found in seen]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` (0 to 1) of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def table(figures: Sequence[Figure]) -> str:
    """Draw the figures as an aligned table."""
    lines = [f"{'figure':44} {'value':>12} {'bound':>12} {'ratio':>7} {'target':>8}"]
    for figure in figures:
        bound = "-" if figure.bound is None else f"{figure.bound:,.4g}"
        ratio = "-" if figure.bound is None else f"{figure.reached:.2f}"
        sign = "≤" if figure.at_most else "≥"
        verdict = "" if figure.is_met else "   MISSED"
        value = f"{figure.value:,.4g} {figure.unit}"
        target = "-" if figure.target is None else f"{sign}{figure.target:g}"
        lines.append(f"{figure.name:44} {value:>12} {bound:>12} {ratio:>7} {target:>8}{verdict}")
        if figure.note:
            lines.append(f"    {figure.note}")
    return "\n".join(lines)
