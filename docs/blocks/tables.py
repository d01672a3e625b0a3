"""docs/reference/states-and-tables.md, from the models of the outbox and of its apps, and the enumerations beside them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from django.apps import apps
from django.db import models
from django.db.backends.postgresql.base import DatabaseWrapper

from docs.blocks import reasons
from docs.blocks.markdown import code, flat, of_app, table
from docs.blocks.source import ROOT, attributes, docstring

STATES = [
    ("A batch", "outbox/models/batch.py", "State"),
    ("A message, as people see it", "outbox/models/message.py", "MessageStatus"),
    ("What a broker answers to a send", "outbox/brokers/types.py", "SendStatus"),
    ("A half message of the embedded broker", "outbox/embedded/half_state.py", "HalfState"),
    ("The answer to a check-back", "outbox/message.py", "Resolution"),
    ("A delivery to a handler", "outbox/consuming/outcome.py", "Outcome"),
]

APPS = ("outbox_embedded", "outbox_pipeline")

WITHOUT_MODEL = {
    "outbox": {
        "outbox_source": "One row: the stable id of this database, for tokens and headers, and the project of its tables.",
        "outbox_wakeup": "The relay that publishers wake, one for each broker. UNLOGGED: gone after a crash.",
    },
    "outbox_embedded": {"outbox_embedded_wakeup": "Consumers of the embedded broker that wait to be woken by a commit."},
}


def page() -> str:
    """Make the page."""
    parts = ["## States", *(_states(*one) for one in STATES), "## Tables"]
    parts += [_table(model) for model in models_of("outbox")]
    parts.append(_without_model("outbox"))
    for label in APPS:
        app = apps.get_app_config(label).name
        parts += [f"## Tables of `{app}`", of_app(app), *(_table(model) for model in models_of(label))]
        if label in WITHOUT_MODEL:
            parts.append(_without_model(label))
    return "\n\n".join(parts)


def all_models() -> list[type[models.Model]]:
    """Return the models of the outbox and of its apps."""
    return [model for label in ("outbox", *APPS) for model in models_of(label)]


def models_of(label: str) -> list[type[models.Model]]:
    """Return an app's models, tables before views, by the names of their tables."""
    found = [model for model in apps.get_app_config(label).get_models() if not model._meta.proxy]
    return sorted(found, key=lambda model: (not model._meta.managed, model._meta.db_table))


def _states(title: str, path: str, name: str) -> str:
    rows = [[code(one.name), code(one.value.replace("'", '"')), one.comment] for one in attributes(path, name)]
    return "\n\n".join([f"### {title}", flat(docstring(path, name)), table(["state", "value", "meaning"], rows)])


def _without_model(label: str) -> str:
    rows = [[code(name), text] for name, text in sorted(WITHOUT_MODEL[label].items())]
    return "\n\n".join(["### Without a model", table(["table", "what it holds"], rows)])


def _table(model: type[models.Model]) -> str:
    name = model._meta.db_table
    title = f"### `{name}`" + ("" if model._meta.managed else " (a view)")
    source = str(Path(inspect.getfile(model)).relative_to(ROOT))
    comments = {one.name: one.comment for one in attributes(source, model.__name__)}
    rows = [_row(field, comments.get(field.name, "")) for field in _columns(model)]
    package = f"{model._meta.app_config.name}.models"
    text = (
        f"`{package}.{model.__name__}`. {flat(docstring(source, model.__name__))} Reason: {reasons.TABLES[model._meta.db_table]}"
    )
    return "\n\n".join([title, text, table(["column", "type", "meaning"], rows)])


def _row(field: models.Field[Any, Any], comment: str) -> list[str]:
    kind = field.db_type(DatabaseWrapper({"OPTIONS": {}, "TIME_ZONE": None, "NAME": ""})) or ""
    return [code(field.column), kind + (", may be NULL" if field.null else ""), comment]


def _columns(model: type[models.Model]) -> Iterator[models.Field[Any, Any]]:
    for field in model._meta.concrete_fields:
        if field.column:
            yield field
