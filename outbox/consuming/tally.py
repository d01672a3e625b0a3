"""Counts of deliveries by outcome."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Self

from outbox.consuming.outcome import Outcome


@dataclass(slots=True)
class Tally:
    """The number of deliveries by outcome. `late`: settled too late for the broker, which delivers the message again."""

    handled: int = 0
    duplicates: int = 0
    ignored: int = 0
    retried: int = 0
    handed_back: int = 0
    dead_letters: int = 0
    late: int = 0

    def count(self, outcome: Outcome) -> None:
        name = _TALLIED[outcome]
        setattr(self, name, getattr(self, name) + 1)

    def __iadd__(self, other: Tally) -> Self:
        for name, number in asdict(other).items():
            setattr(self, name, getattr(self, name) + number)
        return self


_TALLIED = {
    Outcome.HANDLED: "handled",
    Outcome.DUPLICATE: "duplicates",
    Outcome.IGNORED: "ignored",
    Outcome.RETRY: "retried",
    Outcome.HANDED_BACK: "handed_back",
    Outcome.DEAD_LETTER: "dead_letters",
}
