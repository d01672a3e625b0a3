"""Conversion of the dict `OUTBOX` to typed settings."""

from __future__ import annotations

from outbox.conf.sections import Settings
from outbox.errors import ConfigurationError
from outbox.ids import topic_number
from outbox.sections import S, convert, wrong_durations


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


def read_section(raw: object, kind: type[S], place: str) -> S:
    """Turn a dict into a section, which is the whole of `OUTBOX` or the part of it that an app reads; else as `convert`."""
    section = convert(raw, kind, place)
    for problem in wrong_durations(section, place):
        raise ConfigurationError(problem)
    return section
