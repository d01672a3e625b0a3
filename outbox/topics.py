"""Topic rows, which are written from settings. The id of a topic is a hash of its name (`ids.topic_number`)."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

import psycopg
from django.db import ProgrammingError, connections

from outbox import conf, database
from outbox.database.identity import require_own_tables
from outbox.database.wakeup import wake_relay
from outbox.errors import ConfigurationError
from outbox.ids import topic_number
from outbox.message import TopicType

READ_TOPIC = "SELECT broker, type, ordered FROM outbox_topic WHERE name = %s"

IS_PAUSED = "SELECT paused FROM outbox_topic WHERE id = %s"

READ_TOPICS = "SELECT name, broker, type, ordered FROM outbox_topic"

READ_PAUSES = "SELECT name, paused, paused_at, paused_by, pause_reason FROM outbox_topic"

# Insert a new topic, or update a changed one. If another process inserts the same topic at the same time, both its id and its
# name conflict, so ON CONFLICT names no column.
WRITE_TOPIC = """
WITH t (id, name, broker, type, ordered) AS (VALUES (%s::int, %s, %s, %s, %s::boolean)),
new AS (INSERT INTO outbox_topic (id, name, broker, type, ordered) SELECT * FROM t ON CONFLICT DO NOTHING)
UPDATE outbox_topic SET broker = t.broker, type = t.type, ordered = t.ordered FROM t
WHERE outbox_topic.name = t.name
   AND (outbox_topic.broker, outbox_topic.type, outbox_topic.ordered) IS DISTINCT FROM (t.broker, t.type, t.ordered)
"""

# PAUSE leaves a paused topic unchanged. RESUME ends only the pause that the operator saw, and not one that has replaced it.
PAUSE = """
UPDATE outbox_topic SET paused = true, paused_at = clock_timestamp(), paused_by = %(by)s, pause_reason = %(reason)s
WHERE name = %(name)s AND NOT paused
"""
RESUME = """
UPDATE outbox_topic SET paused = false, paused_at = NULL, paused_by = '', pause_reason = ''
WHERE name = %(name)s AND paused AND paused_at IS NOT DISTINCT FROM %(since)s
"""

# The schema in which this connection finds the outbox, its search path now and when the connection was opened, and its role.
FIND_SCHEMA = """
SELECT n.nspname, s.setting, s.reset_val, current_user
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace, pg_settings s
WHERE c.oid = to_regclass('outbox_topic') AND s.name = 'search_path'
"""


LAST_MIGRATION = '("outbox", "0002_records")'


class Pause(NamedTuple):
    """A topic's pause. `at`: None if the topic was not paused by `pause`."""

    at: datetime | None
    by: str
    reason: str


# Topic rows that this process has read or written, by alias, database name (a test database has another one) and topic.
_known: set[tuple[str, str, str]] = set()


def write_topics(using: str) -> None:
    """Write the topics of `OUTBOX["TOPICS"]` into a database, with Django's connection."""
    match_topics(database.raw(using))
    forget(using)


def match_topics(connection: database.Connection) -> set[str]:
    """
    Write the rows of topics that are missing, or differ from the settings.

    During a deployment, two releases may have different settings for a topic. Each relay corrects the rows periodically, so after
    the deployment the rows match the settings of the release that still runs.

    Returns:
        The names of topics that only the database has.
    """
    rows = {row[0]: row[1:] for row in connection.execute(READ_TOPICS).fetchall()}
    for name in conf.settings().topics:
        if rows.pop(name, None) != _expected_row(name):
            connection.execute(WRITE_TOPIC, [topic_number(name), name, *_expected_row(name)])
    return set(rows)


def write_topic(connection: database.Connection, name: str) -> None:
    """
    Write the row of one topic if it is missing or differs from the settings.

    Raises:
        UnknownTopic: the topic is not in settings.
    """
    if connection.execute(READ_TOPIC, [name]).fetchone() != _expected_row(name):
        connection.execute(WRITE_TOPIC, [topic_number(name), name, *_expected_row(name)])


def topic_id(name: str, using: str) -> int:
    """
    Return a topic's id. The first call in a process writes the topic's row if it is missing.

    The row is written on a separate connection, since the caller's transaction may be rolled back. That connection bypasses a
    pooler, whose server connections may all be in use by transactions that wait for this row. If the row is deleted later, a
    relay writes it again within seconds (`match_topics`).

    Raises:
        UnknownTopic: the topic is not in settings.
        ConfigurationError: the database was not migrated, or this connection writes to a schema that no relay reads.
        OtherProject: the tables of the outbox belong to another project.
        django.db.Error: the caller's transaction, or its connection, is broken.
    """
    database_name = str(connections[using].settings_dict["NAME"])
    if (using, database_name, name) in _known:
        return topic_number(name)
    conf.topic_settings(name)
    try:
        with connections[using].wrap_database_errors:  # raises Django's errors, because this is the caller's transaction
            row = database.raw(using).execute(READ_TOPIC, [name]).fetchone()
    except ProgrammingError as error:
        if not isinstance(error.__cause__, psycopg.errors.UndefinedTable):
            raise
        raise ConfigurationError(
            f"Database {using!r} has no tables of the outbox.",
            hint=f"{database.explain_migrate(using)} If a migration publishes, add {LAST_MIGRATION} to its dependencies.",
        ) from error
    _require_visible_schema(using)
    require_own_tables(using, database.raw(using))
    if row is None:
        with database.connect(database.direct_alias(using)) as separate:
            write_topic(separate, name)
    _known.add((using, database_name, name))
    return topic_number(name)


def pause(connection: database.Connection, name: str, *, by: str, reason: str) -> bool:
    """
    Stop relays from claiming messages of a topic, and stop sending messages half first. Publishing continues, and so does the
    delivery of messages that the broker has.

    Returns:
        False if the topic was already paused; then nothing is changed.
    """
    return connection.execute(PAUSE, {"name": name, "by": by, "reason": reason}).rowcount == 1


def pauses(connection: database.Connection) -> dict[str, Pause | None]:
    """Return the pause of each topic in a database; None for a topic that is not paused."""
    rows = connection.execute(READ_PAUSES).fetchall()
    return {name: Pause(*pause) if paused else None for name, paused, *pause in rows}


def is_paused(topic: int, using: str) -> bool:
    """Return whether a topic is paused, as Django's connection sees it. `topic`: its id."""
    with connections[using].cursor() as cursor:
        cursor.execute(IS_PAUSED, [topic])
        return bool(cursor.fetchone() == (True,))


def resume(connection: database.Connection, name: str, *, since: datetime | None) -> bool:
    """
    End a topic's pause, and wake a relay.

    Args:
        since: the `paused_at` of the pause to end.

    Returns:
        False if that pause has ended, or another one has begun; then nothing is changed.
    """
    if connection.execute(RESUME, {"name": name, "since": since}).rowcount == 0:
        return False
    wake_relay(connection)
    return True


def forget(using: str) -> None:
    """Forget the known rows of a database, under all its aliases, since the tables may have been flushed."""
    database_name = str(connections[using].settings_dict["NAME"])
    _known.difference_update([key for key in _known if key[1] == database_name])


def _require_visible_schema(using: str) -> None:
    """Raise if the search path was changed so that it leads to tables that a relay's own connection does not see."""
    schema, path, default_path, user = database.raw(using).execute(FIND_SCHEMA).fetchone() or ("", "", "", "")
    schemas = [user if part == "$user" else part for part in (part.strip().strip('"') for part in default_path.split(","))]
    if path != default_path and schema not in schemas:
        raise ConfigurationError(
            f"The search_path of database {using!r} was changed to {path}, where the outbox's tables are in the schema "
            f"{schema!r}. Relays open connections of their own, with the search_path {default_path}, and never see messages "
            "there.",
            hint="Keep the outbox in a schema that every connection sees, or add an alias to DATABASES for the tenant, "
            "whose OPTIONS set its search_path.",
        )


def _expected_row(name: str) -> tuple[str, TopicType | None, bool]:
    """Return a topic's row according to the settings: broker, type, and whether it keeps order."""
    topic = conf.topic_settings(name)
    return topic.broker, topic.type, topic.type is TopicType.FIFO
