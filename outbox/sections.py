"""
Dicts of settings, and OPTIONS of brokers, as typed objects: names are in capitals, unknown names are rejected.

Errors are in the terms of the settings file: `OUTBOX["RELAY"]["LEASE"]`, not `$.RELAY.LEASE`.
"""

from __future__ import annotations

import difflib
import enum
import inspect
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from outbox.errors import ConfigurationError
from outbox.message import prepare

MAY_BE_ZERO = frozenset({"sweep_age", "wait"})

# PostgreSQL takes no longer time-out. Periods may be longer: they are subtracted from the present time, within its calendar.
LONGEST_WAIT = timedelta(days=24)
LONGEST_PERIOD = timedelta(days=36_500)
PERIODS = frozenset({"retention", "idempotency_retention", "audit_retention", "after", "check_horizon", "dead_for"})

_PLACE = re.compile(r" - at `\$(.*)`$")
_STEP = re.compile(r"\.(\w+)|\[(\.\.\.|\d+)\]")
_NAMES = {"`object`": "a dict", "`array`": "a list", "`duration`": "a duration", "`null`": "None"}


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename=str.upper):
    """A dict of settings."""


S = TypeVar("S", bound=Section)


def convert(raw: object, kind: type[S], place: str) -> S:
    """
    Turn a dict into a section.

    Args:
        place: the name of the dict in errors.

    Raises:
        ConfigurationError: a name is unknown, or a value is wrong; the text names the setting.
    """
    prepare(kind)
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ConfigurationError(*_explain(str(error), raw, kind, place)) from error


def wrong_durations(section: Section, place: str) -> Iterator[str]:
    """Yield what is wrong with durations of a section and of those below it: zero or less, or too long."""
    for name in section.__struct_fields__:
        inner, its_place = getattr(section, name), f'{place}["{name.upper()}"]'
        if isinstance(inner, timedelta):
            longest = LONGEST_PERIOD if name in PERIODS else LONGEST_WAIT
            if inner < timedelta() or (not inner and name not in MAY_BE_ZERO):
                yield f"{its_place} is {inner}; it must be greater than zero."
            elif inner > longest:
                yield f"{its_place} is {inner}; it must be {longest.days:,} days at most."
        for key, entry in inner.items() if isinstance(inner, dict) else [(None, inner)]:
            if isinstance(entry, Section):
                yield from wrong_durations(entry, its_place if key is None else f'{its_place}["{key}"]')


def _explain(text: str, raw: Any, kind: type[Section], place: str) -> tuple[str, str]:
    """
    Return a sentence that says what is wrong in a dict, and one that says what to write; the latter may be empty.

    Args:
        text: the text of msgspec's ValidationError.
        kind: the type that the dict was converted to.
        place: the name of the dict in the sentence.
    """
    what = _PLACE.sub("", text)
    where, hint = _walk(_PLACE.search(text), raw, kind, place)
    section = _section_of(hint)
    if "unknown field" in what and section is not None:
        return _explain_unknown(what.split("`")[1], where, section, kind, place)
    if "missing required field" in what:
        hint = "" if section is None else f"Choices are: {', '.join(_names(section))}."
        return f"{where} has no {what.split('`')[1]}, which is required.", hint
    for name, plain in _NAMES.items():
        what = what.replace(name, plain)
    return f"{where} has a wrong value: {what}.", _advice(what, hint)


def _walk(found: re.Match[str] | None, raw: Any, hint: Any, where: str) -> tuple[str, Any]:
    """Follow msgspec's path; return the name of the setting, and its type."""
    for name, place in _STEP.findall(found[1]) if found else ():
        if name:
            hint = get_type_hints(_section_of(hint), include_extras=True)[name.lower()]
            raw, where = raw[name], f'{where}["{name}"]'
            continue
        hint = get_args(hint)[-1]
        key = int(place) if place.isdecimal() else next(key for key, value in raw.items() if not _fits(value, hint))
        raw, where = raw[key], f"{where}[{key}]" if isinstance(key, int) else f'{where}["{key}"]'
    return where, hint


def _fits(value: object, hint: Any) -> bool:
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return False
    return True


def _section_of(hint: Any) -> type[Section] | None:
    """Return the section in a type: the type itself, or the part of an optional one."""
    for kind in (hint, *get_args(hint)):
        if inspect.isclass(kind) and issubclass(kind, Section):
            return kind
    return None


def _names(section: type[Section]) -> list[str]:
    return [name.upper() for name in section.__struct_fields__]


def _explain_unknown(unknown: str, where: str, section: type[Section], root: type[Section], place: str) -> tuple[str, str]:
    text = f"{where} has an unknown setting {unknown!r}."
    if close := difflib.get_close_matches(unknown.upper(), _names(section), n=1, cutoff=0.75):
        return text, f"Did you mean {close[0]}?"
    if homes := [home for home, inner in _sections(root, place) if unknown in _names(inner)]:
        return text, f"It belongs in {' or '.join(homes)}."
    return text, f"Choices are: {', '.join(_names(section))}."


def _sections(kind: type[Section], place: str) -> Iterator[tuple[str, type[Section]]]:
    """Return a section and those below it, each with its name."""
    yield place, kind
    for name, hint in get_type_hints(kind).items():
        if (inner := _section_of(hint)) is not None:
            entry = "[...]" if get_origin(hint) is dict else ""
            yield from _sections(inner, f'{place}["{name.upper()}"]{entry}')


def _advice(what: str, hint: Any) -> str:
    if "duration" in what:
        return "Write timedelta(seconds=...), or an ISO 8601 duration such as 'PT30S'."
    if "Expected a list, got `str`" in what:
        return 'Write a list: ["..."].'
    section = _section_of(hint)
    if "Expected a dict" in what and section is not None:
        if get_origin(hint) is dict:
            return 'Write {"NAME": {...}}, an entry for each; {} in the place of {...} keeps its defaults.'
        return f"Write {{}} for its defaults, or set: {', '.join(_names(section))}."
    known = get_args(hint) if get_origin(hint) is Literal else ()
    for kind in (hint, *get_args(hint)):
        if inspect.isclass(kind) and issubclass(kind, enum.Enum):
            known = tuple(map(str, kind))
    return f"Choices are: {', '.join(map(repr, known))}." if known else ""
