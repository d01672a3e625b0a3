"""Headers and body of a message, prepared for the admin's pages."""

from __future__ import annotations

from typing import Any

from django.db.models import BinaryField, F, Func, IntegerField, QuerySet
from django.db.models.functions import Substr
from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from outbox.admin.body_preview import READ_BYTES, BodyKind, readable, size_in_words
from outbox.admin.text import shown

KINDS = {
    BodyKind.JSON: "JSON",
    BodyKind.TEXT: gettext_noop("text"),
    BodyKind.BINARY: gettext_noop("binary"),
    BodyKind.HIDDEN: gettext_noop("hidden"),
}


def read_beginning(rows: QuerySet[Any]) -> QuerySet[Any]:
    """Load rows without their body, but with its `size` and its `beginning`, which has all that a page can show of it."""
    size = Func(F("body"), function="octet_length", output_field=IntegerField())
    annotated: QuerySet[Any] = rows.defer("body").annotate(
        size=size, beginning=Substr("body", 1, READ_BYTES, output_field=BinaryField())
    )
    return annotated


def contents(request: HttpRequest, headers: dict[str, str], beginning: bytes | None, size: int | None) -> dict[str, Any]:
    """Return the template context of headers and body; the body is masked unless the user may see masked fields."""
    if beginning is None or size is None:
        return {"headers": [], "body": None}
    body = readable(bytes(beginning), size=size, headers=headers, unmasked=request.user.has_perm("outbox.view_body"))
    return {
        "headers": [(shown(name), shown(value, 500)) for name, value in sorted(headers.items())],
        "body": body,
        "body_kind": _(KINDS[body.kind]),
        "body_text": shown(body.text),
        "body_notes": [shown(note, 500) for note in body.notes],
        "body_size": size_in_words(size),
    }
