"""The bounds of durations in settings and in the options of brokers."""

from __future__ import annotations

from datetime import timedelta

MAY_BE_ZERO = frozenset({"sweep_age", "wait"})

# PostgreSQL takes no longer time-out. Periods may be longer: they are subtracted from the present time, within its calendar.
LONGEST_WAIT = timedelta(days=24)
LONGEST_PERIOD = timedelta(days=36_500)
PERIODS = frozenset({"retention", "idempotency_retention", "audit_retention", "after", "check_horizon", "dead_for"})


def problem_of_duration(name: str, value: timedelta) -> str:
    """Return what is wrong with the duration of a setting, as the end of a sentence; "" if it may have that value."""
    longest = LONGEST_PERIOD if name in PERIODS else LONGEST_WAIT
    if value < timedelta() or (not value and name not in MAY_BE_ZERO):
        return "it must be greater than zero."
    return f"it must be {longest.days:,} days at most." if value > longest else ""
