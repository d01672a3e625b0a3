"""
A message's body as a person may see it: laid out, cut, and with masked fields hidden.

What cannot be told apart is hidden as a whole: whoever may not see masked fields sees no body of a type whose mask
nobody knows any more.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from outbox.message import Header, message_type

READ_BYTES = 8 * 1024 * 1024  # of a larger body only its beginning is read
SHOWN_CHARACTERS = 64 * 1024
SHOWN_HEX_BYTES = 1024

HIDDEN = "•••"

_HIDDEN = msgspec.Raw(msgspec.json.encode(HIDDEN))


class Kind(enum.StrEnum):
    """How a body is shown."""

    JSON = "json"
    TEXT = "text"
    BINARY = "binary"
    HIDDEN = "hidden"


@dataclass(frozen=True, slots=True)
class Readable:
    """A body to be looked at. `notes`: what a person should know about it, such as that it was cut."""

    kind: Kind
    text: str
    notes: tuple[str, ...] = ()


class _MaskUnknownError(Exception):
    """Raised where a body may hold fields that are to be masked, and they cannot be told from others."""


def readable(body: bytes, *, size: int, headers: Mapping[str, str], unmasked: bool = False) -> Readable:
    """
    Lay a body out for a person.

    Args:
        body: the whole of it, or the first `READ_BYTES`.
        size: of the whole, in bytes.
        unmasked: the person may see masked fields.
    """
    type_name = headers.get(Header.TYPE, "")
    notes = []
    if type_name and message_type(type_name) is None:
        notes.append(f"No module defines the type {type_name} (any more).")
    try:
        shown = _laid_out(body, size, headers, is_masked=bool(type_name) and not unmasked)
    except _MaskUnknownError as error:
        return Readable(Kind.HIDDEN, "", (*notes, f"Hidden, {error}. Who may view masked fields sees it."))
    return Readable(shown.kind, shown.text, (*notes, *shown.notes))


def size_in_words(size: int) -> str:
    """Put a size into words: 312 bytes, 4.0 KiB, 3.2 MiB."""
    if size < 1024:
        return f"{size} byte{'' if size == 1 else 's'}"
    return f"{size / 1024:.1f} KiB" if size < 1024 * 1024 else f"{size / 1024 / 1024:.1f} MiB"


def _laid_out(body: bytes, size: int, headers: Mapping[str, str], *, is_masked: bool) -> Readable:
    """Raises _MaskUnknownError."""
    if is_masked:
        body = _masked(body, size, headers)
    content_type = headers.get(Header.CONTENT_TYPE, "").partition(";")[0].strip().lower()
    notes: list[str] = []
    if content_type == "application/json" or content_type.endswith("+json"):
        if size > len(body) and not is_masked:
            notes.append("It is too large to be laid out.")
        else:
            try:
                return _cut(Kind.JSON, msgspec.json.format(body, indent=2).decode(), size)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                notes.append(f"It is not JSON, though its content type says so: {error}.")
    return _as_text_or_hex(body, size, notes)


def _masked(body: bytes, size: int, headers: Mapping[str, str]) -> bytes:
    """Hide the masked fields of a body. Fields that today's type does not know are hidden with them: they had other names."""
    kind = message_type(headers[Header.TYPE])
    if kind is None:
        raise _MaskUnknownError("since nobody knows which of its fields are masked")
    if not kind._meta.mask:
        return body
    if size > len(body):
        raise _MaskUnknownError("since it is too large to be masked")
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _MaskUnknownError("since its fields cannot be told apart") from error
    shown = set(kind.__struct_encode_fields__) - {
        encoded
        for name, encoded in zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True)
        if name in kind._meta.mask
    }
    return msgspec.json.encode({name: value if name in shown else _HIDDEN for name, value in fields.items()})


def _as_text_or_hex(body: bytes, size: int, notes: list[str]) -> Readable:
    try:
        text = body.decode(errors="strict" if size == len(body) else "ignore")
        is_text = "\x00" not in text
    except UnicodeDecodeError:
        is_text = False
    if is_text:
        return _cut(Kind.TEXT, text, size, notes)
    if size > SHOWN_HEX_BYTES:
        notes.append(f"Its first {SHOWN_HEX_BYTES} bytes of {size_in_words(size)}.")
    return Readable(Kind.BINARY, _hex(body[:SHOWN_HEX_BYTES]), tuple(notes))


def _cut(kind: Kind, text: str, size: int, notes: list[str] | None = None) -> Readable:
    if len(text) <= SHOWN_CHARACTERS:
        return Readable(kind, text, tuple(notes or ()))
    cut = f"Cut: the first {SHOWN_CHARACTERS // 1024} KiB of {size_in_words(size)}."
    return Readable(kind, text[:SHOWN_CHARACTERS], (*(notes or ()), cut))


def _hex(data: bytes) -> str:
    lines = []
    for start in range(0, len(data), 16):
        row = data[start : start + 16]
        letters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{start:08x}  {row.hex(' '):<47}  {letters}")
    return "\n".join(lines)
