"""Topic rows, which are written from settings. The id of a topic follows from its name (`ids.topic_number`)."""

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

# A topic that is new or changed. Where another process inserts its row at the same time, id and name are taken: ON CONFLICT names
# neither of them.
WRITE_TOPIC = """
WITH t (id, name, broker, type, ordered) AS (VALUES (%s::int, %s, %s, %s, %s::boolean)),
new AS (INSERT INTO outbox_topic (id, name, broker, type, ordered) SELECT * FROM t ON CONFLICT DO NOTHING)
UPDATE outbox_topic SET broker = t.broker, type = t.type, ordered = t.ordered FROM t
WHERE outbox_topic.name = t.name
   AND (outbox_topic.broker, outbox_topic.type, outbox_topic.ordered) IS DISTINCT FROM (t.broker, t.type, t.ordered)
"""

# Pausing a topic that is paused changes nothing, nor does resuming one whose pause is not the one that the operator saw.
PAUSE = """
UPDATE outbox_topic SET paused = true, paused_at = clock_timestamp(), paused_by = %(by)s, pause_reason = %(reason)s
WHERE name = %(name)s AND NOT paused
"""
RESUME = """
UPDATE outbox_topic SET paused = false, paused_at = NULL, paused_by = '', pause_reason = ''
WHERE name = %(name)s AND paused AND paused_at IS NOT DISTINCT FROM %(since)s
"""

# The schema in which this connection finds the outbox, and its search path, now and when the connection was opened.
FIND_HOME = """
SELECT n.nspname, s.setting, s.reset_val, current_user
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace, pg_settings s
WHERE c.oid = to_regclass('outbox_topic') AND s.name = 'search_path'
"""


LAST_MIGRATION = '("outbox", "0002_records")'


class Pause(NamedTuple):
    """A topic's pause. `at`: None where it was not paused by `pause`."""

    at: datetime | None
    by: str
    reason: str


# Rows that this process has seen or written: alias, name of its database (a test's is another), topic.
_seen: set[tuple[str, str, str]] = set()


def write_topics(using: str) -> None:
    """Write the topics of `OUTBOX["TOPICS"]` into a database, over its Django connection."""
    match_topics(database.raw(using))
    forget(using)


def match_topics(connection: database.Connection) -> set[str]:
    """
    Write the rows of topics that are missing, or differ from the settings.

    Two releases that run side by side may have different settings for a topic. Each relay corrects the rows repeatedly, so that
    the release that stays wins, whichever started last.

    Returns:
        The names of topics that only the database has.
    """
    rows = {row[0]: row[1:] for row in connection.execute(READ_TOPICS).fetchall()}
    for name in conf.settings().topics:
        if rows.pop(name, None) != _wanted(name):
            connection.execute(WRITE_TOPIC, [topic_number(name), name, *_wanted(name)])
    return set(rows)


def write_topic(connection: database.Connection, name: str) -> None:
    """
    Write the row of one topic where it is missing or differs from the settings.

    Raises:
        UnknownTopic: the topic is not in settings.
    """
    if connection.execute(READ_TOPIC, [name]).fetchone() != _wanted(name):
        connection.execute(WRITE_TOPIC, [topic_number(name), name, *_wanted(name)])


def topic_id(name: str, using: str) -> int:
    """
    Return a topic's id. The first call of a process writes its row where there is none.

    It is written over a connection of its own, since the caller's transaction may be rolled back. That connection bypasses a
    pooler, whose server connections may all be held by transactions that wait for this row. A row that goes missing later is
    written by a relay, within seconds (`match_topics`).

    Raises:
        UnknownTopic: the topic is not in settings.
        ConfigurationError: the database was not migrated, or this connection writes to a schema that no relay reads.
        OtherProject: the tables of the outbox belong to another project.
        django.db.Error: the caller's transaction, or its connection, is broken.
    """
    database_name = str(connections[using].settings_dict["NAME"])
    if (using, database_name, name) in _seen:
        return topic_number(name)
    conf.topic_settings(name)
    try:
        with connections[using].wrap_database_errors:  # in the caller's transaction, so the caller's errors
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
        with database.connect(database.direct_alias(using)) as own:
            write_topic(own, name)
    _seen.add((using, database_name, name))
    return topic_number(name)


def pause(connection: database.Connection, name: str, *, by: str, reason: str) -> bool:
    """
    Stop relays from claiming messages of a topic; none goes half first. Publishing continues, and so do deliveries of messages
    that the broker has.

    Returns:
        False when the topic was paused already; nothing is changed then.
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
        since: the `paused_at` of that pause.

    Returns:
        False when that pause has ended, or another one has begun; nothing is changed then.
    """
    if connection.execute(RESUME, {"name": name, "since": since}).rowcount == 0:
        return False
    wake_relay(connection)
    return True


def forget(using: str) -> None:
    """Forget which rows a database has, under all its aliases, since they may have been flushed."""
    database_name = str(connections[using].settings_dict["NAME"])
    _seen.difference_update([key for key in _seen if key[1] == database_name])


def _require_visible_schema(using: str) -> None:
    """Raise where the search path was changed and leads to tables that a relay's own connection does not see."""
    home, path, path_of_new, user = database.raw(using).execute(FIND_HOME).fetchone() or ("", "", "", "")
    schemas = [user if part == "$user" else part for part in (part.strip().strip('"') for part in path_of_new.split(","))]
    if path != path_of_new and home not in schemas:
        raise ConfigurationError(
            f"The search_path of database {using!r} was changed to {path}, where the outbox's tables are in the schema {home!r}. "
            f"Relays open connections of their own, with {path_of_new}, and would never see a message there.",
            hint="Keep the outbox in a schema that every connection sees, or give the tenant an alias in DATABASES "
            "whose OPTIONS set its search_path.",
        )


def _wanted(name: str) -> tuple[str, TopicType | None, bool]:
    """Return a topic's row according to the settings: broker, type, and whether it keeps order."""
    topic = conf.topic_settings(name)
    return topic.broker, topic.type, topic.type is TopicType.FIFO
