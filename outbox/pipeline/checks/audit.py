"""System checks of `OUTBOX["PIPELINE"]["AUDIT"]`: the business rows that must have a message."""

from __future__ import annotations

from collections.abc import Iterable

import psycopg
from django.core.checks import CheckMessage, Error

from outbox.checks.decorators import check, check_each_database
from outbox.database import Connection
from outbox.errors import ConfigurationError
from outbox.pipeline.business import business_of, place_of, problems_with
from outbox.pipeline.checks.settings import pipeline_settings
from outbox.pipeline.spark.sources.statements import of_business

REFUSALS = {"42601", "42703", "42883", "42804", "42846", "22P02", "42702", "42803"}
"""SQLSTATE of errors in a condition itself: syntax, column, function, type."""


@check()
def check_business_rows() -> Iterable[CheckMessage]:
    """
    E038: An entry of `OUTBOX["PIPELINE"]["AUDIT"]` names a model, a message type or a field that the audit cannot use.

    Correct the name; the text says which. A message type is known once its module is imported: `messages.py` of each app is
    imported automatically, other modules by the app's `ready()`. The model has a primary key of one column, and AT is a date-time
    field of it or of its parents.
    """
    return [
        Error(f"{place_of(name)} {text}", hint=hint, id="outbox.E038")
        for name, entry in pipeline_settings().audit.items()
        for text, hint in problems_with(entry)
    ]


@check_each_database
def check_conditions(alias: str, connection: Connection) -> Iterable[CheckMessage]:
    """
    E056: PostgreSQL refuses the SQL in `WHERE` of an entry of `OUTBOX["PIPELINE"]["AUDIT"]`.

    Correct it; the table's alias is `b`. Where a table is missing, `migrate` comes first.
    """
    for name, entry in pipeline_settings().audit.items():
        try:
            query = of_business(business_of(name, entry)).query
        except ConfigurationError:  # E038 reports it
            continue
        try:
            if entry.where:
                connection.execute(f"EXPLAIN {query}")
        except psycopg.Error as error:
            if error.sqlstate in REFUSALS:
                refused = f"database {alias!r} refuses: {str(error).strip().splitlines()[0]}"
                text = f"{place_of(name)} has WHERE {entry.where!r}, which {refused}"
                yield Error(text, hint="Correct the SQL; the table's alias is b.", id="outbox.E056")
