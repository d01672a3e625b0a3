"""
Find the data that a check-back needs.

- The database of the half message, which its token names.
- The business row that the message is about. Operators see whether it exists; the answer does not depend on it.
- The half message of a message id, for an operator who knows only the id.
"""

from __future__ import annotations

import enum
from datetime import timedelta
from typing import Any
from uuid import UUID

import psycopg
from django.apps import apps
from django.core.exceptions import ValidationError
from django.db.models import Model
from psycopg import sql

from outbox import conf, database
from outbox.database import Connection
from outbox.logs import get_logger, log_fields
from outbox.message import Half, Token

logger = get_logger("outbox.check_back")

STATEMENT_TIMEOUT = timedelta(seconds=5)  # for each statement of an answer, and for connecting

# `transaction_read_only` is also on while a server is in recovery, so it recognizes a replica, which must not answer check-backs.
READ_SOURCE = "SELECT id, current_setting('transaction_read_only')::boolean FROM outbox_source"

_aliases: dict[str, str] = {}  # source id -> alias of the database


def fields_of(half: Half) -> dict[str, Any]:
    """Return the fields of a log record about a half message."""
    return log_fields(message_id=half.message_id, topic=half.topic)


def alias_of(token: str, *, otherwise: str) -> str:
    """
    Return the alias of the database that a token names.

    Args:
        otherwise: the alias for an empty token, and for a token whose source is unknown. In the second case, `resolve` finds that
            the token belongs to another source, and answers UNKNOWN.
    """
    if not token:
        return otherwise
    source = token.rsplit(":", 3)[0]
    if source not in _aliases:
        _read_sources()
    return _aliases.get(source, otherwise)


def connect(alias: str) -> database.Connection:
    """Open a connection with the lock timeout of `OUTBOX["CHECK_BACK"]` and a short statement timeout."""
    times = {"lock_timeout": conf.settings().check_back.lock_timeout, "statement_timeout": STATEMENT_TIMEOUT}
    return database.connect(
        alias,
        application_name="outbox check-back",
        # PostgreSQL takes 0 for no limit.
        settings={name: str(max(1, round(limit.total_seconds() * 1000))) for name, limit in times.items()},
        connect_timeout=max(2, round(STATEMENT_TIMEOUT.total_seconds())),  # libpq's minimum is 2 s
    )


def _read_sources() -> None:
    """Read the source of every outbox database. If a replica has an alias, too, the alias of the primary is used."""
    for alias in database.outbox_databases():
        try:
            with connect(alias) as connection:
                row = connection.execute(READ_SOURCE).fetchone()
        except psycopg.Error as error:
            logger.warning("The source of database %r cannot be read: %s", alias, error, extra=log_fields(database=alias))
            continue
        if row is not None:
            source, is_read_only = row
            if not is_read_only or source not in _aliases:
                _aliases[source] = alias


READ_ABOUT = "SELECT about FROM outbox_message WHERE id = %s"

# The primary key is passed as untyped text, so that PostgreSQL converts it to the column's type and uses the index.
IS_THERE = "SELECT EXISTS (SELECT FROM {table} WHERE {key} = %s)"


class About(enum.StrEnum):
    """Whether the business row exists. NONE: the message names no row, or the row could not be looked up."""

    EXISTS = "exists"
    MISSING = "missing"
    NONE = "none"


def look_up(connection: Connection, message_id: str) -> About:
    """Look up the row that a message is about (`shop.order:4711`) by its primary key, in the message's database."""
    try:
        row = connection.execute(READ_ABOUT, [UUID(message_id)]).fetchone()
        if row is None or row[0] is None:
            return About.NONE
        label, _, key = row[0].partition(":")
        return _look_up_row(connection, apps.get_model(label), key)
    except (psycopg.Error, LookupError, ValueError, ValidationError):
        return About.NONE


def _look_up_row(connection: Connection, model: type[Model], key: str) -> About:
    primary_key = model._meta.pk
    if primary_key.column is None:  # a composite key, which is not looked up
        return About.NONE
    query = sql.SQL(IS_THERE).format(table=sql.Identifier(model._meta.db_table), key=sql.Identifier(primary_key.column))
    with connection.transaction():  # PostgreSQL may reject the key as a value of the column's type
        row = connection.execute(query, [key]).fetchone()
    return About.EXISTS if row == (True,) else About.MISSING


# Read a message's state and the values of its token. A message has a half message if it is in a batch of a transaction topic;
# after the decision, the batch must name the half message. A message that was sent half first has no lane at its first attempt;
# the token of that half message names batch 0, which means none.
FIND = """
SELECT s.topic, s.state, s.key, s.created_at, source.id,
       CASE WHEN s.lane IS NULL AND s.attempt = 1 THEN 0 ELSE s.batch_id END, s.attempt, s.position,
       coalesce(b.half_ids[s.position], ''),
       t.type = 'transaction' AND (s.state NOT IN ('prepared', 'sent') OR b.half_ids[s.position] IS NOT NULL)
FROM outbox_source source, outbox_message_state s
LEFT JOIN outbox_batch b ON b.id = s.batch_id LEFT JOIN outbox_topic t ON t.id = s.topic_id
WHERE s.id = %s
"""


def find(connection: Connection, message_id: UUID) -> tuple[str, str, Half | None] | None:
    """
    Return a message's topic, its state, and the half message that a broker would ask about; None if there is no such message.

    The state is that of `outbox_message_state`. A message that still waits, or is sent in one phase, has no half message.
    """
    row = connection.execute(FIND, [message_id]).fetchone()
    if row is None:
        return None
    topic, state, key, created_at, source, batch, attempt, position, half_id, has_half = row
    if batch is None or not has_half:
        return topic, state, None
    token = Token(source, batch, attempt, position)
    return topic, state, Half(topic, str(message_id), half_id, str(token), born_at=created_at, key=key)
