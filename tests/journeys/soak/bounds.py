"""What may grow in a soak, and how much: the figures of minute 5 beside those of the end."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

# Each figure of the table is the largest of so many seconds: autovacuum comes once a minute, and a day lasts one.
WINDOW = 120


class Bound(NamedTuple):
    """The most that a figure may be at the end: that of minute 5, times `factor`, and `more`."""

    factor: float
    more: float


BOUNDS: dict[str, Bound] = {
    # Allocators keep the memory of the largest batch so far, and after a kill one may be larger than any before. In half an hour
    # at 20 messages a second, it is 200 bytes for each message.
    "memory (MiB)": Bound(1, 6),
    # The server may not have noticed the end of a killed process yet, whose successor is connected; and the maintenance of two
    # relays has connections of its own for moments.
    "connections": Bound(1, 4),
    # Those of the statements that run when they are counted; a claim or a prune locks each table and index that it uses.
    "locks": Bound(2, 50),
    # A table is as large as its most rows were between two vacuums, and the work after a kill comes at once.
    "size (MiB)": Bound(1.5, 1),
    # Autovacuum begins once a minute, at a fifth of the rows.
    "dead rows": Bound(1.5, 2000),
    # Those of two to three days, and of those ahead.
    "partitions": Bound(1, 1),
    # What is published within the 10 s until a killed relay's lane is taken over.
    "messages": Bound(1.5, 200),
}

Figures = Mapping[tuple[str, str], float]  # by kind, one of BOUNDS, and what was measured


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    kind: str
    subject: str
    early: float
    end: float

    @property
    def ratio(self) -> float | None:
        return round(self.end / self.early, 2) if self.early else None

    @property
    def limit(self) -> float:
        bound = BOUNDS[self.kind]
        return round(self.early * bound.factor + bound.more, 1)

    @property
    def is_over(self) -> bool:
        return self.end > self.limit

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio, "limit": self.limit, "is_over": self.is_over}


def compare(samples: Sequence[tuple[float, Figures]], mark: float) -> list[Row]:
    """
    Return a row for each thing that was not 0 all the time; 0 where it was not measured.

    Args:
        samples: seconds since the beginning, and the figures.
        mark: seconds since the beginning, instead of minute 5 in a shorter soak.
    """
    early, end = _largest(samples, mark), _largest(samples, samples[-1][0])
    kinds = list(BOUNDS)
    ordered = sorted(early.keys() | end.keys(), key=lambda one: (kinds.index(one[0]), one[1]))
    rows = [Row(*one, round(early.get(one, 0), 2), round(end.get(one, 0), 2)) for one in ordered]
    return [row for row in rows if row.early or row.end]


def as_text(rows: Sequence[Row]) -> str:
    """Return the table."""
    lines = [("", "minute 5", "end", "ratio", "limit", "")]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        name = f"{row.kind}: {row.subject}"
        lines.append((name, f"{row.early:g}", f"{row.end:g}", ratio, f"{row.limit:g}", "OVER" if row.is_over else ""))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        ).rstrip()
        for line in lines
    )


def _largest(samples: Sequence[tuple[float, Figures]], until: float) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for seconds, figures in samples:
        if until - WINDOW < seconds <= until:
            for one, value in figures.items():
                found[one] = max(value, found.get(one, value))
    return found
