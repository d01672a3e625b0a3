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
        ConfigurationError: a name is unknown, or a value is wrong; the error names the setting.
    """
    section = read_section(raw, Settings, "OUTBOX")
    names: dict[int, str] = {}  # topic id, a hash of the name -> name
    for name, topic in section.topics.items():
        if topic.broker not in section.brokers:
            raise ConfigurationError(
                f'OUTBOX["TOPICS"]["{name}"] names the broker {topic.broker!r}, which is not in OUTBOX["BROKERS"] '
                f"({', '.join(sorted(section.brokers)) or 'empty'}).",
                hint="Add the broker there, or correct its name.",
            )
        if (other := names.setdefault(topic_number(name), name)) != name:
            raise ConfigurationError(
                f'The topics {other!r} and {name!r} in OUTBOX["TOPICS"] have the same id, which is a hash of the name.',
                hint="Rename one of them.",
            )
    return section


def read_section(raw: object, kind: type[S], path: str) -> S:
    """
    Turn a dict into a section: the whole of `OUTBOX`, or the part of it that an app reads.

    Args:
        path: the dict's path in the settings, for error texts.

    Raises:
        ConfigurationError: a name is unknown, or a value is wrong.
    """
    section = convert(raw, kind, path)
    for problem in wrong_durations(section, path):
        raise ConfigurationError(problem)
    return section
