"""The business row that a message is about. It is reported with an answer, and has no influence on it."""

from __future__ import annotations

import enum
from uuid import UUID

import psycopg
from django.apps import apps
from django.core.exceptions import ValidationError
from django.db.models import Model
from psycopg import sql

from outbox.database import Connection

READ_ABOUT = "SELECT about FROM outbox_message WHERE id = %s"

# The primary key is passed as untyped text, so that PostgreSQL converts it to the column's type and uses the index.
IS_THERE = "SELECT EXISTS (SELECT FROM {table} WHERE {key} = %s)"


class About(enum.StrEnum):
    """Whether the business row exists. NONE: the message names no row, or the row cannot be looked up."""

    EXISTS = "exists"
    MISSING = "missing"
    NONE = "none"


def look_up(connection: Connection, message_id: str) -> About:
    """Look for the row that a message is about (`shop.order:4711`), by primary key, in the message's own database."""
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
    if primary_key.column is None:  # a composite key: the message names one value only
        return About.NONE
    primary_key.to_python(key)
    query = sql.SQL(IS_THERE).format(table=sql.Identifier(model._meta.db_table), key=sql.Identifier(primary_key.column))
    row = connection.execute(query, [key]).fetchone()
    return About.EXISTS if row == (True,) else About.MISSING
