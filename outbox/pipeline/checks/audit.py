"""System checks of `OUTBOX["PIPELINE"]["AUDIT"]`: the business rows that must have a message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.apps import apps
from django.core.checks import CheckMessage, Error
from django.core.exceptions import FieldDoesNotExist

from outbox.message import message_type
from outbox.pipeline.checks.settings import pipeline_settings
from outbox.pipeline.conf import AuditSettings


def check_business_rows(**kwargs: Any) -> list[CheckMessage]:
    """
    E038: An entry of `OUTBOX["PIPELINE"]["AUDIT"]` names a model, a message type or a field that does not exist.

    Correct the name; the text says which. A message type is known once its module is imported: `messages.py` of each app is
    imported automatically, other modules by the app's `ready()`. The SQL in `WHERE` is not checked here, but by `outbox_audit`.
    """
    return [
        Error(f'OUTBOX["PIPELINE"]["AUDIT"]["{name}"] {text}', hint=hint, id="outbox.E038")
        for name, entry in pipeline_settings().audit.items()
        for text, hint in _problems(entry)
    ]


def _problems(entry: AuditSettings) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with an entry, and what to do."""
    if message_type(entry.expects) is None:
        text = f"expects {entry.expects!r}, but no message type has this name."
        yield text, "Write the name of the type as it is sent, and make sure that its module is imported."
    try:
        meta = apps.get_model(entry.model)._meta
    except (LookupError, ValueError) as error:
        yield f"names the model {entry.model!r}: {error}", 'Write "app.Model".'
        return
    try:
        if entry.at:
            meta.get_field(entry.at)
    except FieldDoesNotExist:
        names = ", ".join(sorted(field.name for field in meta.concrete_fields))
        yield f"has AT {entry.at!r}, but {meta.object_name} has no such field.", f"Its fields are {names}."
