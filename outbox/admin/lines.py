"""Line charts over time: SVG without styles or scripts, and the same numbers as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from outbox.admin.text import Text, local

WIDTH, HEIGHT = 1100, 130
LEFT, TOP, BOTTOM = 64, 12, 22  # room for the scale, and for the times below


Values = Sequence[float | None]  # at equal distances; None: unknown, and the line is interrupted


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
    Return what the drawing's template needs.

    Args:
        name: of this drawing on its page, for references.
        lines: the values of each, by its name.
        say: puts a value into words.
        by_decades: draw by decades, not by equal steps.
    """
    known = [value for values in lines.values() for value in values if value is not None]
    low, high = _ends(known, by_decades)
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


def _ends(values: Sequence[float], by_decades: bool) -> tuple[float, float]:
    """Return the values at the bottom and at the top."""
    if not by_decades:
        return min(0.0, *values, 0.0), max(1.0, *values, 1.0)
    known = [value for value in values if value > 0] or [1.0]
    low = math.floor(math.log10(min(known)))
    return 10**low, 10 ** max(low + 1, math.ceil(math.log10(max(known))))


def _pieces(values: Values, low: float, high: float, scaled: Callable[[float], float]) -> Any:
    """Return the points of each uninterrupted segment; a single value is a short dash."""
    step = (WIDTH - 2 - LEFT) / max(1, len(values) - 1)
    piece: list[tuple[float, float]] = []
    for n, value in enumerate([*values, None]):
        if value is not None:
            share = (scaled(max(value, low)) - scaled(low)) / (scaled(high) - scaled(low))
            piece.append((LEFT + n * step, HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)))
        elif piece:
            if len(piece) == 1:
                piece = [(piece[0][0] - 2, piece[0][1]), (piece[0][0] + 2, piece[0][1])]
            yield " ".join(f"{x:.1f},{y:.1f}" for x, y in piece)
            piece = []


def _rows(lines: Sequence[Values], begins_at: datetime, ends_at: datetime, say: Callable[[float], str]) -> list[Any]:
    """Return the time and the values of each row with a known value, newest first."""
    count = max(map(len, lines), default=0)
    step = (ends_at - begins_at) / max(1, count)
    rows = [
        (local(begins_at + n * step), ["" if values[n] is None else say(values[n] or 0) for values in lines])
        for n in reversed(range(count))
    ]
    return [row for row in rows if any(row[1])]
