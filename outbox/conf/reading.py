"""Conversion of the dict `OUTBOX` to typed settings, with errors that name the setting."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

import msgspec

from outbox.conf.explain import explain
from outbox.conf.sections import Section, Settings
from outbox.durations import problem_of_duration
from outbox.errors import ConfigurationError
from outbox.ids import topic_number
from outbox.message import prepare


def read(raw: object) -> Settings:
    """
    Turn the dict `OUTBOX` into settings.

    Raises:
        ConfigurationError: a name is unknown, or a value is wrong; the text names the setting.
    """
    section = read_section(raw, Settings, "OUTBOX")
    names: dict[int, str] = {}  # by the ids that follow from them
    for name, topic in section.topics.items():
        if topic.broker not in section.brokers:
            raise ConfigurationError(
                f'OUTBOX["TOPICS"]["{name}"] names the broker {topic.broker!r}, which is not in OUTBOX["BROKERS"] '
                f"({', '.join(sorted(section.brokers)) or 'empty'}).",
                hint="Add it there, or correct the name.",
            )
        if (other := names.setdefault(topic_number(name), name)) != name:
            raise ConfigurationError(
                f'The topics {other!r} and {name!r} in OUTBOX["TOPICS"] have the same id, which is a hash of the name.',
                hint="Call one of them by another name.",
            )
    return section


S = TypeVar("S", bound=Section)


def read_section(raw: object, kind: type[S], place: str) -> S:
    """
    Turn a dict into a section, which is the whole of `OUTBOX` or the part of it that an app reads.

    Args:
        place: the name of the dict in errors.

    Raises:
        ConfigurationError: a name is unknown, or a value is wrong; the text names the setting.
    """
    prepare(kind)
    try:
        section = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ConfigurationError(*explain(str(error), raw, kind, place)) from error
    _require_durations(section, place)
    return section


def _require_durations(section: Section, place: str) -> None:
    """Raise ConfigurationError for a duration of zero or less, or one that is too long."""
    durations = {name: value for name in section.__struct_fields__ if isinstance(value := getattr(section, name), timedelta)}
    for name, value in durations.items():
        if problem := problem_of_duration(name, value):
            raise ConfigurationError(f'{place}["{name.upper()}"] is {value}; {problem}')
    for name in section.__struct_fields__:
        inner = getattr(section, name)
        for key, entry in inner.items() if isinstance(inner, dict) else [(None, inner)]:
            if isinstance(entry, Section):
                _require_durations(entry, f'{place}["{name.upper()}"]' + (f'["{key}"]' if key is not None else ""))
