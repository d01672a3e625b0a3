"""Texts of ages and counts, and options of commands that a text names."""

from __future__ import annotations

from django.db import DEFAULT_DB_ALIAS

from outbox import database


def age(seconds: float | None) -> str:
    """Return an age as text: 0.4 s, 12 s, 3 min, 5 h, 2 d; "" for None."""
    if seconds is None:
        return ""
    for limit, size, unit in ((10, 0, "s"), (120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds:.1f} {unit}" if size == 0 else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def count(number: int, noun: str) -> str:
    """Return a number with its noun: 1 message, 1,200 messages."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def wait(number: int, topic: str = "") -> str:
    """Return a clause about waiting messages: 1 message waits, 2 messages of topic 'orders' wait."""
    of_topic = f" of topic {topic!r}" if topic else ""
    return f"{count(number, 'message')}{of_topic} {'waits' if number == 1 else 'wait'}"


def of_unsent(using: str) -> str:
    """Return the option with which `outbox_replay --unsent` acts on a database; "" for its default."""
    return "" if using == DEFAULT_DB_ALIAS else f" --database {using}"


def of_pause(using: str) -> str:
    """Return the option with which `outbox_pause` leaves the topic alone in other databases; "" if there are none."""
    return f" --database {using}" if len(database.outbox_databases()) > 1 else ""


def pause(by: str, seconds: float | None, reason: str) -> str:
    """Return a text about a topic's pause, as far as known: paused by ada for 3 min: stocktaking."""
    since = f" for {age(seconds)}" if seconds is not None else ""
    return f"paused{f' by {by}' if by else ''}{since}{f': {reason}' if reason else ''}"
