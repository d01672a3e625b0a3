"""
Consumers: their topics, their databases, the isolation of their transactions, their groups' names.

Two handlers of one message type in one group are refused earlier, when the second is defined.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.core.checks import CheckMessage, Error
from django.core.checks import Warning as Caution
from django.db import connections
from psycopg import IsolationLevel

from outbox import conf, database
from outbox.consuming.register import Consumer, groups
from outbox.errors import ConfigurationError, UnknownTopic
from outbox.message import TopicType
from outbox.publishing.rules import TOPIC_RULE, is_topic_name


def check_topics(**kwargs: Any) -> list[CheckMessage]:
    """
    E016: A consumer takes a plain topic that is not in `OUTBOX["TOPICS"]`, one of a broker that only sends, or wants order where
    the topic keeps none.

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
            found.append(Error(text, hint=f"Choices are: {known}.", id="outbox.E017"))
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


def check_isolation(**kwargs: Any) -> list[CheckMessage]:
    """
    W046: A consumer group's database has its transactions at REPEATABLE READ or SERIALIZABLE (`OPTIONS["isolation_level"]`).

    Of two handlers that write what the other has read, PostgreSQL ends one with a serialization failure. Its message comes again,
    and no try is counted; what the handler did outside of the database is done again, too. The more handlers write the same rows,
    the more often. Keep them short, or leave `isolation_level` out and lock what a handler changes by `select_for_update()`.
    Where the level is meant, silence this check.
    """
    return [
        Caution(
            f"The consumer group {name!r} writes to database {group.using!r}, whose transactions are {level}: handlers that "
            "conflict are done again.",
            hint="Keep handlers short and their effects in the database, or leave isolation_level out of its OPTIONS.",
            id="outbox.W046",
        )
        for name, group in sorted(groups().items())
        if (level := _strict_level(group.using)) is not None
    ]


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


def _strict_level(alias: str) -> str | None:
    """Return the isolation level of a database's transactions where it is stricter than READ COMMITTED, as settings tell."""
    if alias not in connections.settings or connections[alias].vendor != "postgresql":  # E017 and E007 have said it
        return None
    level = connections[alias].settings_dict["OPTIONS"].get("isolation_level")
    strict = {IsolationLevel.REPEATABLE_READ: "REPEATABLE READ", IsolationLevel.SERIALIZABLE: "SERIALIZABLE"}
    return strict.get(level)


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
    try:
        broker = conf.broker_class(topic.broker)
    except ConfigurationError:  # E003 has said it
        return
    if not broker.supports_consumers:
        yield Error(
            f"{one.name} takes topic {one.topic!r}, and its broker {topic.broker!r} ({broker.__name__}) has no consumer groups.",
            hint="Publish to a topic of another broker what a consumer is to handle.",
            id="outbox.E016",
        )
    if one.ordered and topic.type is not TopicType.FIFO:
        yield Error(
            f"{one.name} wants its messages in order, but topic {one.topic!r} is of type {topic.type} and keeps none.",
            hint=f'Set OUTBOX["TOPICS"]["{one.topic}"]["TYPE"] = "fifo", or leave ordered=True out.',
            id="outbox.E016",
        )
