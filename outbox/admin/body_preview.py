"""
The preview of a message's body: formatted, truncated, and with masked fields hidden.

Users without the permission for masked fields do not see a body at all if its masked fields cannot be determined, for example
because no module defines its type any more.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from outbox.message import Header, Message, message_type

READ_BYTES = 8 * 1024 * 1024  # only this beginning of a larger body is read
SHOWN_CHARACTERS = 64 * 1024
SHOWN_HEX_BYTES = 1024

DECLARED_CONTENT_TYPE = "application/json"  # the content type of messages whose type a module defines

HIDDEN = "•••"

_HIDDEN = msgspec.Raw(msgspec.json.encode(HIDDEN))


class BodyKind(enum.StrEnum):
    """How a body is shown."""

    JSON = "json"
    TEXT = "text"
    BINARY = "binary"
    HIDDEN = "hidden"


class Readable(msgspec.Struct, frozen=True):
    """A formatted body. `notes`: remarks for the user, for example that it was truncated."""

    kind: BodyKind
    text: str
    notes: tuple[str, ...] = ()


class _MaskUnknownError(Exception):
    """Raised if a body may have masked fields, and they cannot be determined."""


def readable(body: bytes, *, size: int, headers: Mapping[str, str], unmasked: bool = False) -> Readable:
    """
    Format a body.

    Args:
        body: the whole body, or its first `READ_BYTES`.
        size: size of the whole body in bytes.
        unmasked: the user may see masked fields.
    """
    type_name = headers.get(Header.TYPE, "")
    notes = []
    is_declared = headers.get(Header.CONTENT_TYPE, DECLARED_CONTENT_TYPE) == DECLARED_CONTENT_TYPE
    if type_name and is_declared and message_type(type_name) is None:
        notes.append(_("No module defines the type {}.").format(type_name))
    try:
        shown = _formatted(body, size, headers, is_masked=bool(type_name) and not unmasked)
    except _MaskUnknownError as error:
        return Readable(BodyKind.HIDDEN, "", (*notes, _("Hidden: {} Users who may view masked fields can see it.").format(error)))
    return Readable(shown.kind, shown.text, (*notes, *shown.notes))


def is_field_shown(headers: Mapping[str, str], field: str) -> bool:
    """Return whether users without the permission for masked fields see a field of a body, by the rules of `readable`."""
    type_name = headers.get(Header.TYPE, "")
    if not type_name:
        return True
    kind = message_type(type_name)
    return kind is not None and (not kind._meta.mask or field in _shown_fields(kind))


def size_in_words(size: int) -> str:
    """Return a size with its unit: 312 bytes, 4.0 KiB, 3.2 MiB."""
    if size < 1024:
        return ngettext("{} byte", "{} bytes", size).format(size)
    return f"{size / 1024:.1f} KiB" if size < 1024 * 1024 else f"{size / 1024 / 1024:.1f} MiB"


def _formatted(body: bytes, size: int, headers: Mapping[str, str], *, is_masked: bool) -> Readable:
    """
    Format a body, masked or not.

    Raises:
        _MaskUnknownError: its masked fields cannot be determined.
    """
    if is_masked:
        body = _masked(body, size, headers)
    content_type = headers.get(Header.CONTENT_TYPE, "").partition(";")[0].strip().lower()
    notes: list[str] = []
    if content_type == "application/json" or content_type.endswith("+json"):
        if size > len(body) and not is_masked:
            notes.append(_("It is too large to be formatted."))
        else:
            try:
                return _cut(BodyKind.JSON, msgspec.json.format(body, indent=2).decode(), size)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                notes.append(_("It has a JSON content type, but is not valid JSON: {}.").format(error))
    return _as_text_or_hex(body, size, notes)


def _masked(body: bytes, size: int, headers: Mapping[str, str]) -> bytes:
    """
    Hide the masked fields of a body, and all fields that the current type does not have: these may be renamed masked fields.

    Raises:
        _MaskUnknownError: the masked fields cannot be determined.
    """
    kind = message_type(headers[Header.TYPE])
    if kind is None:
        raise _MaskUnknownError(_("it is not known which of its fields are masked."))
    if not kind._meta.mask:
        return body
    if size > len(body):
        raise _MaskUnknownError(_("it is too large to be masked."))
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _MaskUnknownError(_("it cannot be parsed.")) from error
    shown = _shown_fields(kind)
    return msgspec.json.encode({name: value if name in shown else _HIDDEN for name, value in fields.items()})


def _shown_fields(kind: type[Message]) -> set[str]:
    """Return the names that the unmasked fields of a type have in bodies."""
    named = zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True)
    return {encoded for name, encoded in named if name not in kind._meta.mask}


def _as_text_or_hex(body: bytes, size: int, notes: list[str]) -> Readable:
    try:
        text = body.decode(errors="strict" if size == len(body) else "ignore")
        is_text = "\x00" not in text
    except UnicodeDecodeError:
        is_text = False
    if is_text:
        return _cut(BodyKind.TEXT, text, size, notes)
    if size > SHOWN_HEX_BYTES:
        notes.append(_("Only the first {} bytes of {} are shown.").format(SHOWN_HEX_BYTES, size_in_words(size)))
    return Readable(BodyKind.BINARY, _hex(body[:SHOWN_HEX_BYTES]), tuple(notes))


def _cut(kind: BodyKind, text: str, size: int, notes: list[str] | None = None) -> Readable:
    if len(text) <= SHOWN_CHARACTERS:
        return Readable(kind, text, tuple(notes or ()))
    cut = _("Truncated: the first {} KiB of {}.").format(SHOWN_CHARACTERS // 1024, size_in_words(size))
    return Readable(kind, text[:SHOWN_CHARACTERS], (*(notes or ()), cut))


def _hex(data: bytes) -> str:
    lines = []
    for start in range(0, len(data), 16):
        row = data[start : start + 16]
        letters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{start:08x}  {row.hex(' '):<47}  {letters}")
    return "\n".join(lines)
