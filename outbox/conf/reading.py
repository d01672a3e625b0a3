"""From the dict `OUTBOX` to settings, or to an error that names the place."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

import msgspec

from outbox.conf.explain import explain
from outbox.conf.sections import Section, Settings
from outbox.errors import ConfigurationError
from outbox.message import prepare

MAY_BE_ZERO = frozenset({"sweep_age", "wait"})
"""Durations that may be 0; every other one must be greater."""

LIMITS = {"retry_base": "retry_limit", "breaker_base": "breaker_limit", "idle_wait_min": "idle_wait_max"}
"""Durations that grow, each with the one it never exceeds."""


def read(raw: object) -> Settings:
    """
    Turn the `OUTBOX` dict into settings.

    Raises:
        ConfigurationError: a name is unknown, or a value is wrong; the text names the place.
    """
    found = read_section(raw, Settings, "OUTBOX")
    for name, topic in found.topics.items():
        if topic.broker not in found.brokers:
            raise ConfigurationError(
                f'OUTBOX["TOPICS"]["{name}"] names the broker {topic.broker!r}, which is not in OUTBOX["BROKERS"] '
                f"({', '.join(sorted(found.brokers)) or 'empty'}). Add it there, or correct the name."
            )
    return found


S = TypeVar("S", bound=Section)


def read_section(raw: object, kind: type[S], place: str) -> S:
    """
    Turn a dict into a section, for the whole of `OUTBOX` and for what an app has in it.

    Args:
        place: how an error names the dict.

    Raises:
        ConfigurationError: a name is unknown, or a value is wrong; the text names the place.
    """
    prepare(kind)
    try:
        found = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ConfigurationError(explain(str(error), raw, kind, place)) from error
    _require_durations(found, place)
    return found


def _require_durations(section: Section, place: str) -> None:
    """Raise ConfigurationError for a duration of zero or less, and for one beyond its limit."""
    durations = {name: value for name in section.__struct_fields__ if isinstance(value := getattr(section, name), timedelta)}
    for name, value in durations.items():
        if value < timedelta() or (not value and name not in MAY_BE_ZERO):
            raise ConfigurationError(f'{place}["{name.upper()}"] is {value}; it must be greater than zero.')
    for name, limit in LIMITS.items():
        if name in durations and durations[name] > durations[limit]:
            raise ConfigurationError(
                f'{place}["{name.upper()}"] is {durations[name]}, longer than its limit, '
                f'{place}["{limit.upper()}"] of {durations[limit]}. Lower the one or raise the other.'
            )
    for name in section.__struct_fields__:
        inner = getattr(section, name)
        for key, entry in inner.items() if isinstance(inner, dict) else [(None, inner)]:
            if isinstance(entry, Section):
                _require_durations(entry, f'{place}["{name.upper()}"]' + (f'["{key}"]' if key is not None else ""))
