"""Line charts over time: SVG without styles or scripts, and the same numbers as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from outbox.admin.text import Text, local

WIDTH, HEIGHT = 1100, 130
LEFT, TOP, BOTTOM = 64, 12, 22  # margins: the scale is on the left, and the times are below


Values = Sequence[float | None]  # at equal intervals of time; None is unknown, and interrupts the line


def drawing(
    name: str,
    title: Text,
    text: Text,
    lines: Mapping[Text, Values],
    *,
    begins_at: datetime,
    ends_at: datetime,
    say: Callable[[float], str],
    by_decades: bool = False,
) -> dict[str, Any]:
    """
    Return the context that the drawing's template needs.

    Args:
        name: a prefix of HTML ids, unique on the page.
        lines: name of a line -> its values.
        say: returns a value as text.
        by_decades: use a logarithmic scale, for values of very different sizes.
    """
    known = [value for values in lines.values() for value in values if value is not None]
    low, high = _limits(known, by_decades)
    scaled = math.log10 if by_decades else float
    return {
        "name": name,
        "title": title,
        "text": text,
        "width": WIDTH,
        "height": HEIGHT,
        "left": LEFT,
        "right": WIDTH - 2,
        "top": TOP,
        "middle": (TOP + HEIGHT - BOTTOM) // 2,
        "bottom": HEIGHT - BOTTOM,
        "base": HEIGHT - 6,
        "low": say(low),
        "high": say(high),
        "begins": local(begins_at),
        "ends": local(ends_at),
        "lines": [
            {"name": line, "nth": nth, "pieces": list(_pieces(values, low, high, scaled))}
            for nth, (line, values) in enumerate(lines.items())
        ],
        "rows": _rows(list(lines.values()), begins_at, ends_at, say),
    }


def _limits(values: Sequence[float], by_decades: bool) -> tuple[float, float]:
    """Return the values at the bottom and at the top of the scale."""
    if not by_decades:
        return min(0.0, *values, 0.0), max(1.0, *values, 1.0)
    known = [value for value in values if value > 0] or [1.0]
    lowest_exponent = math.floor(math.log10(min(known)))
    return 10**lowest_exponent, 10 ** max(lowest_exponent + 1, math.ceil(math.log10(max(known))))


def _pieces(values: Values, low: float, high: float, scaled: Callable[[float], float]) -> Any:
    """Yield the points of each uninterrupted segment of a line; a single value becomes a short dash."""
    step = (WIDTH - 2 - LEFT) / max(1, len(values) - 1)
    points: list[tuple[float, float]] = []
    for n, value in enumerate([*values, None]):
        if value is not None:
            share = (scaled(max(value, low)) - scaled(low)) / (scaled(high) - scaled(low))
            points.append((LEFT + n * step, HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)))
        elif points:
            if len(points) == 1:
                points = [(points[0][0] - 2, points[0][1]), (points[0][0] + 2, points[0][1])]
            yield " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            points = []


def _rows(lines: Sequence[Values], begins_at: datetime, ends_at: datetime, say: Callable[[float], str]) -> list[Any]:
    """Return the time and the values of each row with a known value, newest first."""
    count = max(map(len, lines), default=0)
    step = (ends_at - begins_at) / max(1, count)
    rows = [
        (local(begins_at + n * step), ["" if values[n] is None else say(values[n] or 0) for values in lines])
        for n in reversed(range(count))
    ]
    return [row for row in rows if any(row[1])]
