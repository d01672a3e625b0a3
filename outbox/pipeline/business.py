"""The business rows of `OUTBOX["PIPELINE"]["AUDIT"]`: what is wrong with an entry, and what the jobs read for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.apps import apps
from django.core.exceptions import FieldDoesNotExist
from django.db import connections, router
from django.db.models import DateTimeField, Field
from django.db.models.options import Options

from outbox.errors import ConfigurationError
from outbox.message import message_type
from outbox.pipeline.conf import PLACE, AuditSettings
from outbox.pipeline.spark.config import Business


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
    owner, current = _concrete(field.model._meta), _concrete(meta)
    while current is not owner:
        parent = getattr(current.pk, "remote_field", None)
        if parent is None or not parent.parent_link:
            return None
        current = parent.model._meta
    return current


def _concrete(meta: Options[Any]) -> Options[Any]:
    """Return the model that has the table of a model; a proxy has none."""
    assert meta.concrete_model is not None
    return meta.concrete_model._meta


def business_of(name: str, entry: AuditSettings) -> Business:
    """
    Return what the jobs read for an entry.

    Raises:
        ConfigurationError: the first of its problems.
    """
    for text, hint in problems_with(entry):
        raise ConfigurationError(f"{place_of(name)} {text}", hint)
    model, kind = apps.get_model(entry.model), message_type(entry.expects)
    assert kind is not None
    meta, quoted = _concrete(model._meta), connections[router.db_for_read(model)].ops.quote_name
    table, key, at = quoted(meta.db_table), quoted(_key(meta)), ""
    if entry.at:
        field = meta.get_field(entry.at)
        assert isinstance(field, DateTimeField)
        at, owner = quoted(str(field.column)), _owner(meta, field)
        if owner is not None and owner is not meta:  # the column is in the table of a parent
            join = f"{quoted(owner.db_table)} parent ON parent.{quoted(_key(owner))} = child.{key}"
            table = f"(SELECT child.*, parent.{at} FROM {table} child JOIN {join})"  # noqa: S608
    return Business(
        name=name,
        topic=kind._meta.topic,
        type=entry.expects,
        about=meta.label_lower,
        table=table,
        key=key,
        where=entry.where,
        at=at,
    )
