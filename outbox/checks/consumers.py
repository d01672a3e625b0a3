"""
Check consumers: their topics, databases, isolation levels, and names of groups.

A second handler of a message type in one group raises an error earlier, when it is defined.
"""

from __future__ import annotations

from collections.abc import Iterable

from django.core.checks import CheckMessage, Error
from django.core.checks import Warning as Caution
from django.db import connections, router
from psycopg import IsolationLevel

from outbox import conf, database
from outbox.brokers.capabilities import Receives
from outbox.checks.decorators import check
from outbox.consuming.register import all_consumers, groups
from outbox.errors import ConfigurationError, UnknownTopic
from outbox.models import MessageRow
from outbox.publishing.rules import TOPIC_RULE, is_topic_name


@check()
def check_topics() -> Iterable[CheckMessage]:
    """
    E016: A consumer names a topic that is not in `OUTBOX["TOPICS"]`, or whose broker only sends.

    Add the topic or correct its name. If its broker only sends, publish these messages to a topic of another broker.
    """
    for consumer in all_consumers():
        try:
            topic = conf.topic_settings(consumer.topic)
        except UnknownTopic as error:
            if consumer.type is None:  # E006 reports it for message types
                yield Error(f"{consumer.name}: {error.message}", hint=error.hint, id="outbox.E016")
            continue
        except ConfigurationError:  # E001 or E003 reports it
            continue
        try:
            broker = conf.broker_class(topic.broker)
        except ConfigurationError:  # E003 reports it
            continue
        if not Receives.has(broker):
            its = f"its broker {topic.broker!r} ({broker.__name__})"
            text = f"{consumer.name} subscribes to topic {consumer.topic!r}, but {its} has no consumer groups."
            hint = "Publish messages that a consumer handles to a topic of another broker."
            yield Error(text, hint=hint, id="outbox.E016")


@check()
def check_databases() -> Iterable[CheckMessage]:
    """
    E017: A consumer's `using` is not a database, or is a database without an inbox, such as an empty `DATABASES["default"]`.

    The inbox row is committed with the rows that the handler writes, so both must be in the same database: let the routers
    migrate the app outbox in that database (`allow_migrate`), or name another database.
    """
    for consumer in all_consumers():
        if consumer.using not in connections.settings:
            known = ", ".join(sorted(connections.settings))
            text = f"{consumer.name} writes to the database {consumer.using!r}, which is not in DATABASES."
            yield Error(text, hint=f"Choices are: {known}.", id="outbox.E017")
        elif connections[consumer.using].vendor != "postgresql":
            if consumer.using != router.db_for_write(MessageRow):  # E007 reports it
                text = f"{consumer.name} writes to the database {consumer.using!r}, which is not PostgreSQL, so it has no inbox."
                choices = ", ".join(database.outbox_databases()) or "none"
                yield Error(text, hint=f"Name another: @consumer(..., using=...). Choices are: {choices}.", id="outbox.E017")
        elif not database.is_outbox_database(consumer.using):
            home = f"the database {consumer.using!r}, where routers do not allow the tables of the outbox"
            hint = "Let allow_migrate() of the routers allow the app outbox in that database."
            yield Error(f"{consumer.name} writes to {home}, so it has no inbox.", hint=hint, id="outbox.E017")


@check()
def check_isolation() -> Iterable[CheckMessage]:
    """
    W046: Transactions of a consumer group's database are REPEATABLE READ or SERIALIZABLE (`OPTIONS["isolation_level"]`).

    If two handlers each write rows that the other one has read, PostgreSQL ends one of them with a serialization failure. Its
    message is redelivered without counting a failure, and effects outside of the database are repeated, too. Keep such handlers
    short, or remove `isolation_level` and lock rows with `select_for_update()`. If the level is intended, silence this check.
    """
    return [
        Caution(
            f"The consumer group {name!r} writes to database {group.using!r}, whose transactions are {level}, so handlers that "
            "conflict are repeated.",
            hint="Keep handlers short and their effects in the database, or remove isolation_level from its OPTIONS.",
            id="outbox.W046",
        )
        for name, group in sorted(groups().items())
        if (level := _strict_level(group.using)) is not None
    ]


@check()
def check_names() -> Iterable[CheckMessage]:
    """
    W018: A consumer group has a name that some brokers do not accept.

    Names of groups follow the rule for topics: 1 to 127 letters, digits, `%`, `_` and `-`. A renamed group starts as a new one.
    """
    return [
        Caution(
            f"A consumer group is called {name!r}, a name that some brokers do not accept.",
            hint=TOPIC_RULE.replace("A topic", "Like a topic"),
            id="outbox.W018",
        )
        for name in groups()
        if not is_topic_name(name)
    ]


def _strict_level(alias: str) -> str | None:
    """Return the isolation level of a database in settings if it is stricter than READ COMMITTED; otherwise None."""
    if alias not in connections.settings or connections[alias].vendor != "postgresql":  # E017 and E007 report it
        return None
    level = connections[alias].settings_dict["OPTIONS"].get("isolation_level")
    strict = {IsolationLevel.REPEATABLE_READ: "REPEATABLE READ", IsolationLevel.SERIALIZABLE: "SERIALIZABLE"}
    return strict.get(level)
