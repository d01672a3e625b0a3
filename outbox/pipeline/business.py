"""The business rows of `OUTBOX["PIPELINE"]["AUDIT"]`: the problems of an entry, and its query for the jobs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from django.apps import apps
from django.core.exceptions import FieldDoesNotExist
from django.db import connections, router
from django.db.models import DateTimeField, Field
from django.db.models.options import Options

from outbox.errors import ConfigurationError
from outbox.message import Message, message_type
from outbox.pipeline.conf import PLACE, AuditSettings
from outbox.pipeline.spark.config import Business
from outbox.publishing.transactions import key_text


def place_of(name: str) -> str:
    """Return how errors name an entry of AUDIT."""
    return f'{PLACE}["AUDIT"]["{name}"]'


def problems_with(entry: AuditSettings) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with an entry, and what to do."""
    if message_type(entry.expects) is None:
        text = f"has EXPECTS {entry.expects!r}, but no message type has this name."
        yield text, "Write the name of the type as it is sent, and make sure that its module is imported."
    try:
        meta = apps.get_model(entry.model)._meta
    except (LookupError, ValueError) as error:
        yield f"has MODEL {entry.model!r}: {error}", 'Write "app.Model".'
        return
    if not _key(meta):
        text = f"has MODEL {entry.model!r}, whose primary key has several columns."
        yield text, "Name a model with a key of one column: the audit finds a row's messages by its key."
    if entry.at and (problem := _problem_with_at(meta, entry.at)):
        yield problem


def _key(meta: Options[Any]) -> str:
    """Return the column of a model's primary key; "" if it has several."""
    return (meta.pk.column if meta.pk is not None else None) or ""


def _problem_with_at(meta: Options[Any], at: str) -> tuple[str, str] | None:
    times = sorted(field.name for field in meta.concrete_fields if isinstance(field, DateTimeField) and _owner(meta, field))
    hint = f"Its date-time fields are {', '.join(times)}." if times else "It has no date-time field: leave AT out."
    try:
        field = meta.get_field(at)
    except FieldDoesNotExist:
        return f"has AT {at!r}, but {meta.object_name} has no such field.", hint
    if not isinstance(field, DateTimeField):
        return f"has AT {at!r}, which is not a date-time field of {meta.object_name}.", hint
    if not _owner(meta, field):
        return f"has AT {at!r}, a field of another parent than the one whose key {meta.object_name} has.", hint
    return None


def _owner(meta: Options[Any], field: Field[Any, Any]) -> Options[Any] | None:
    """Return the model whose table has a field: this one, or a parent with the same key. None: a parent with another key."""
    owner = _concrete(field.model._meta)
    return owner if owner in (_concrete(meta), *_parents(meta)) else None


def _parents(meta: Options[Any]) -> Iterator[Options[Any]]:
    """Yield the models whose rows with the same key are parts of the rows of a model."""
    current = _concrete(meta)
    while (parent := getattr(current.pk, "remote_field", None)) is not None and parent.parent_link:
        current = parent.model._meta
        yield current


def _concrete(meta: Options[Any]) -> Options[Any]:
    """Return the model that has the table of a model; a proxy has none."""
    return (meta.concrete_model or meta.model)._meta


def business_of(name: str, entry: AuditSettings) -> Business:
    """
    Return what the jobs read for an entry.

    Raises:
        ConfigurationError: the first of its problems.
    """
    for text, hint in problems_with(entry):
        raise ConfigurationError(f"{place_of(name)} {text}", hint)
    model = apps.get_model(entry.model)
    meta = _concrete(model._meta)
    topic = cast("type[Message]", message_type(entry.expects))._meta.topic
    connection = connections[router.db_for_read(model)]
    quoted = connection.ops.quote_name
    table, key, at = quoted(meta.db_table), quoted(_key(meta)), ""
    kind = str(meta.pk.cast_db_type(connection))
    if entry.at:
        field = cast("DateTimeField[Any, Any]", meta.get_field(entry.at))
        at, owner = quoted(str(field.column)), _owner(meta, field)
        if owner is not None and owner is not meta:  # the column is in the table of a parent
            join = f"{quoted(owner.db_table)} parent ON parent.{quoted(_key(owner))} = child.{key}"
            table = f"(SELECT child.*, parent.{at} FROM {table} child JOIN {join})"  # noqa: S608
    return Business(
        name=name,
        topic=topic,
        type=entry.expects,
        about=meta.label_lower,
        table=table,
        key=key_text(f"b.{key}", kind),
        where=entry.where,
        at=at,
        also=sorted(model._meta.label_lower for model in apps.get_models() if meta in _parents(model._meta)),
    )
