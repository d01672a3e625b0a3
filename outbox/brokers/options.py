"""OPTIONS of a broker as one typed object: names are in capitals, unknown names are rejected."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from outbox.brokers.base import Problem
from outbox.errors import ConfigurationError
from outbox.message import prepare


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename=str.upper):
    """Base of a broker's options."""


O = TypeVar("O", bound=Options)  # noqa: E741


def read_options(kind: type[O], raw: Mapping[str, Any]) -> O:
    """
    Turn OPTIONS into the typed options of a broker.

    Raises:
        ConfigurationError: a name is unknown, or a value is wrong; the text names it.
    """
    prepare(kind)
    try:
        return msgspec.convert(dict(raw), kind)
    except msgspec.ValidationError as error:
        raise ConfigurationError(
            f'OUTBOX["BROKERS"] has wrong OPTIONS ({kind.__name__}): {error}.{_hint(kind, str(error))}'
        ) from error


def problems_with(kind: type[Options], raw: Mapping[str, Any]) -> list[Problem]:
    """Return what `read_options` would raise, with a hint."""
    prepare(kind)
    try:
        msgspec.convert(dict(raw), kind)
    except msgspec.ValidationError as error:
        known = ", ".join(name.upper() for name in kind.__struct_fields__)
        return [Problem(f"OPTIONS: {error}.", _hint(kind, str(error)).strip() or f"Choices are: {known}.")]
    return []


def _hint(kind: type[Options], text: str) -> str:
    if "unknown field" not in text:
        return ""
    known = [name.upper() for name in kind.__struct_fields__]
    close = difflib.get_close_matches(text.split("`")[1].upper(), known, n=1)
    return f" Did you mean {close[0]}?" if close else ""
