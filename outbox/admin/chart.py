"""The flow of the last hour as a drawing: SVG without style or script, and the same numbers as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from django.utils import timezone

from outbox.flow import LOOKED_AT, Minute

WIDTH, HEIGHT = 1100, 150
LEFT, TOP, BOTTOM = 50, 10, 24  # room for the scale, and for the times below


def chart(minutes: Sequence[Minute]) -> dict[str, Any]:
    """Give what the drawing's template needs: lines, scale, words, and the numbers."""
    top = max([1, *(count for minute in minutes for count in (minute.published, minute.handled) if count)])
    published, handled = (sum(_counts(minutes, read)) for read in (_published, _handled))
    whole = all(minute.published is not None and minute.handled is not None for minute in minutes)
    text = f"In the last hour {published:,} messages were published and {handled:,} handled, at most {top:,} in a minute."
    if not whole:
        text = f"{text} Only the newest {LOOKED_AT:,} of each were counted; what is older is not drawn."
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "left": LEFT,
        "right": WIDTH - 2,
        "top": TOP,
        "middle": (TOP + HEIGHT - BOTTOM) // 2,
        "bottom": HEIGHT - BOTTOM,
        "base": HEIGHT - 6,
        "scale": top,
        "published": _line(minutes, _published, top),
        "handled": _line(minutes, _handled, top),
        "begins": timezone.localtime(minutes[0].begins_at),
        "ends": timezone.localtime(minutes[-1].begins_at),
        "text": text,
        "minutes": [minute for minute in reversed(minutes) if minute.published or minute.handled],
    }


def _published(minute: Minute) -> int | None:
    return minute.published


def _handled(minute: Minute) -> int | None:
    return minute.handled


def _counts(minutes: Sequence[Minute], read: Callable[[Minute], int | None]) -> list[int]:
    return [count for minute in minutes if (count := read(minute)) is not None]


def _line(minutes: Sequence[Minute], read: Callable[[Minute], int | None], top: int) -> str:
    """Give the corners of a line, from where its numbers are known on."""
    step = (WIDTH - 2 - LEFT) / (len(minutes) - 1)
    rise = HEIGHT - BOTTOM - TOP
    return " ".join(
        f"{LEFT + n * step:.1f},{HEIGHT - BOTTOM - count / top * rise:.1f}"
        for n, minute in enumerate(minutes)
        if (count := read(minute)) is not None
    )
