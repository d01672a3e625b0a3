"""
Consumers: their topics, their databases, their groups' names.

Two handlers of one message type in one group are refused earlier, when the second is defined.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.core.checks import CheckMessage, Error
from django.core.checks import Warning as Caution
from django.db import connections

from outbox import conf, database
from outbox.consuming.register import Consumer, groups
from outbox.errors import ConfigurationError, UnknownTopic
from outbox.message import TopicType
from outbox.publishing.rules import TOPIC_RULE, is_topic_name


def check_topics(**kwargs: Any) -> list[CheckMessage]:
    """
    E016: A consumer takes a plain topic that is not in `OUTBOX["TOPICS"]`, or wants order where the topic keeps none.

    Add the topic or correct the name; give the topic TYPE "fifo", or leave `ordered=True` out.
    """
    return [problem for one in _consumers() for problem in _problems_of_topic(one)]


def check_databases(**kwargs: Any) -> list[CheckMessage]:
    """
    E017: A consumer's `using` names no database, or one without inbox.

    The inbox row commits together with what the handler writes, so it stands in the same database: let the routers
    migrate the app outbox there (`allow_migrate`), or name another database.
    """
    found: list[CheckMessage] = []
    for one in _consumers():
        if one.using not in connections.settings:
            known = ", ".join(sorted(connections.settings))
            text = f"{one.name} writes to the database {one.using!r}, which is not in DATABASES."
            found.append(Error(text, hint=f"Known are {known}.", id="outbox.E017"))
        elif connections[one.using].vendor == "postgresql" and not database.is_outbox_database(one.using):
            found.append(
                Error(
                    f"{one.name} writes to the database {one.using!r}, where the routers allow no tables of the outbox: "
                    "its inbox has no place.",
                    hint="Have allow_migrate() let the app outbox into that database.",
                    id="outbox.E017",
                )
            )
    return found


def check_names(**kwargs: Any) -> list[CheckMessage]:
    """
    W018: A consumer group has a name that not every broker takes.

    The rule is that of topics: 1 to 127 letters, digits, `%`, `_` and `-`. A group that is renamed begins anew.
    """
    return [
        Caution(
            f"A consumer group is called {name!r}, which not every broker takes.",
            hint=TOPIC_RULE.replace("A topic", "Like a topic"),
            id="outbox.W018",
        )
        for name in groups()
        if not is_topic_name(name)
    ]


def _consumers() -> Iterator[Consumer]:
    for group in groups().values():
        yield from group.consumers.values()


def _problems_of_topic(one: Consumer) -> Iterator[CheckMessage]:
    try:
        topic = conf.topic_settings(one.topic)
    except UnknownTopic as error:
        if one.type is None:  # E006 says it of types
            text, _, hint = str(error).partition(". ")
            yield Error(f"{one.name}: {text}.", hint=hint, id="outbox.E016")
        return
    except ConfigurationError:  # E001 or E003 has said it
        return
    if one.ordered and topic.type is not TopicType.FIFO:
        yield Error(
            f"{one.name} wants its messages in order, but topic {one.topic!r} is of type {topic.type} and keeps none.",
            hint=f'Set OUTBOX["TOPICS"]["{one.topic}"]["TYPE"] = "fifo", or leave ordered=True out.',
            id="outbox.E016",
        )
