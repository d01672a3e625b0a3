"""System checks of `OUTBOX["PIPELINE"]`. docs/reference/checks.md is generated from their docstrings."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import psycopg
from django.core.checks import CheckMessage, Error

from outbox.checks.decorators import check, check_each_database
from outbox.checks.settings import known_settings
from outbox.conf.reading import read_section
from outbox.database import Connection
from outbox.errors import ConfigurationError
from outbox.pipeline import conf
from outbox.pipeline.job_config import business_of, problems_with, setting_of
from outbox.pipeline.spark.statements import of_business


@check()
def check_settings() -> Iterable[CheckMessage]:
    """Report under E001 an unknown name or a wrong value in `OUTBOX["PIPELINE"]`."""
    try:
        read_section(known_settings().pipeline, conf.PipelineSettings, conf.SETTING)
    except ConfigurationError as error:
        hint = f"{error.hint} The package's outbox/pipeline/conf.py lists all names, with their types, defaults and units."
        yield Error(error.message, hint=hint.strip(), id="outbox.E001")


def pipeline_settings() -> conf.PipelineSettings:
    """Return the pipeline's settings; the defaults if E001 has reported an error in them."""
    try:
        return conf.settings()
    except ConfigurationError:
        return conf.PipelineSettings()


ERRORS_IN_CONDITION = {"42601", "42703", "42883", "42804", "42846", "22P02", "42702", "42803"}
"""SQLSTATEs of errors in the condition itself: syntax, unknown column or function, wrong type."""


@check()
def check_business_rows() -> Iterable[CheckMessage]:
    """
    E038: An entry of `OUTBOX["PIPELINE"]["AUDIT"]` names a model, a message type or a field that the audit cannot use.

    The text says which name is wrong. A message type is known once its module is imported: `messages.py` of each app is
    imported automatically, other modules by the app's `ready()`. The model must have a primary key of one column, and AT must
    be a date-time field of the model or of its parents.
    """
    return [
        Error(f"{setting_of(name)} {text}", hint=hint, id="outbox.E038")
        for name, entry in pipeline_settings().audit.items()
        for text, hint in problems_with(entry)
    ]


@check_each_database
def check_conditions(alias: str, connection: Connection) -> Iterable[CheckMessage]:
    """
    E056: PostgreSQL rejects the SQL in `WHERE` of an entry of `OUTBOX["PIPELINE"]["AUDIT"]`.

    Correct the SQL; the table's alias is `b`. A missing table is not reported: run `migrate` first.
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
            if error.sqlstate in ERRORS_IN_CONDITION:
                rejection = f"database {alias!r} refuses: {str(error).strip().splitlines()[0]}"
                text = f"{setting_of(name)} has WHERE {entry.where!r}, which {rejection}"
                yield Error(text, hint="Correct the SQL; the table's alias is b.", id="outbox.E056")


@check()
def check_archive() -> Iterable[CheckMessage]:
    """
    E036: `OUTBOX["PIPELINE"]["ARCHIVE"]["PATH"]` is not an absolute path on this machine.

    A relative path would depend on the working directory of each process. Remote storage must be mounted.

    E037: `OUTBOX["PIPELINE"]["ARCHIVE"]["AFTER"]` is shorter than `OUTBOX["RETENTION"]`.

    An archived day is deleted from the database, so RETENTION would not be kept. Raise AFTER, or lower RETENTION.
    """
    archive, retention = pipeline_settings().archive, known_settings().retention
    if archive is None:
        return
    path = archive.path
    if not Path(path).is_absolute() or "://" in path:
        text = f'OUTBOX["PIPELINE"]["ARCHIVE"]["PATH"] is {path!r}, which is not an absolute path.'
        yield Error(text, hint="Set it to a folder such as /srv/lake; mount remote storage.", id="outbox.E036")
    if archive.after is not None and archive.after < retention:
        text = f'OUTBOX["PIPELINE"]["ARCHIVE"]["AFTER"] is {archive.after}, shorter than OUTBOX["RETENTION"], {retention}.'
        yield Error(text, hint="Remove AFTER, or set it to RETENTION or more.", id="outbox.E037")
