"""
Convert dicts of settings, and OPTIONS of brokers, to typed objects. Names are in capitals; unknown names are rejected.

Errors name a setting as the settings file does: `OUTBOX["RELAY"]["LEASE"]`, not `$.RELAY.LEASE`.
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

MAY_BE_ZERO = frozenset({"sweep_age", "wait"})  # names of durations; all others must be positive

# The maximum of waits is PostgreSQL's maximum for timeouts. Periods, such as retentions, may be longer, because they are only
# subtracted from the present time.
MAX_WAIT = timedelta(days=24)
MAX_PERIOD = timedelta(days=36_500)
PERIODS = frozenset({"retention", "idempotency_retention", "audit_retention", "after", "check_horizon", "dead_for"})

# The path at the end of msgspec's errors, such as " - at `$.RELAY.LEASE`", and a step of such a path.
_PATH = re.compile(r" - at `\$(.*)`$")
_STEP = re.compile(r"\.(\w+)|\[(\.\.\.|\d+)\]")
_NAMES = {"`object`": "a dict", "`array`": "a list", "`duration`": "a duration", "`null`": "None"}


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename=str.upper):
    """A dict of settings."""


S = TypeVar("S", bound=Section)


def convert(raw: object, kind: type[S], path: str) -> S:
    """
    Turn a dict into a section.

    Args:
        path: the name of the dict in error texts, such as `OUTBOX["RELAY"]`.

    Raises:
        ConfigurationError: a name is unknown, or a value is wrong; the error names the setting.
    """
    prepare(kind)
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ConfigurationError(*_explain(str(error), raw, kind, path)) from error


def wrong_durations(section: Section, path: str) -> Iterator[str]:
    """Yield an error text for each duration in a section, or in sections below it, that is not positive or is too long."""
    for name in section.__struct_fields__:
        inner, inner_path = getattr(section, name), f'{path}["{name.upper()}"]'
        if isinstance(inner, timedelta):
            longest = MAX_PERIOD if name in PERIODS else MAX_WAIT
            if inner < timedelta() or (not inner and name not in MAY_BE_ZERO):
                yield f"{inner_path} is {inner}; it must be greater than zero."
            elif inner > longest:
                yield f"{inner_path} is {inner}; it must be {longest.days:,} days at most."
        for key, entry in inner.items() if isinstance(inner, dict) else [(None, inner)]:
            if isinstance(entry, Section):
                yield from wrong_durations(entry, inner_path if key is None else f'{inner_path}["{key}"]')


def _explain(text: str, raw: Any, kind: type[Section], path: str) -> tuple[str, str]:
    """
    Return a sentence that names the problem in a dict, and one that says what to write; the latter may be empty.

    Args:
        text: the text of msgspec's ValidationError.
        kind: the type that the dict was converted to.
        path: the name of the dict in the sentence.
    """
    problem = _PATH.sub("", text)
    setting, type_ = _follow(_PATH.search(text), raw, kind, path)
    section = _section_of(type_)
    if "unknown field" in problem and section is not None:
        return _explain_unknown(problem.split("`")[1], setting, section, kind, path)
    if "missing required field" in problem:
        hint = "" if section is None else f"Choices are: {', '.join(_names(section))}."
        return f"{setting} has no {problem.split('`')[1]}, which is required.", hint
    for name, plain in _NAMES.items():
        problem = problem.replace(name, plain)
    return f"{setting} has a wrong value: {problem}.", _advice(problem, type_)


def _follow(match: re.Match[str] | None, raw: Any, type_: Any, setting: str) -> tuple[str, Any]:
    """Follow the path in msgspec's error; return the name of the setting to which it leads, and its type."""
    for name, index in _STEP.findall(match[1]) if match else ():
        if name:
            type_ = get_type_hints(_section_of(type_), include_extras=True)[name.lower()]
            raw, setting = raw[name], f'{setting}["{name}"]'
            continue
        type_ = get_args(type_)[-1]
        key = int(index) if index.isdecimal() else next(key for key, value in raw.items() if not _fits(value, type_))
        raw, setting = raw[key], f"{setting}[{key}]" if isinstance(key, int) else f'{setting}["{key}"]'
    return setting, type_


def _fits(value: object, type_: Any) -> bool:
    try:
        msgspec.convert(value, type_)
    except msgspec.ValidationError:
        return False
    return True


def _section_of(type_: Any) -> type[Section] | None:
    """Return the section in a type: the type itself, or an argument of it, as in an optional type."""
    for kind in (type_, *get_args(type_)):
        if inspect.isclass(kind) and issubclass(kind, Section):
            return kind
    return None


def _names(section: type[Section]) -> list[str]:
    return [name.upper() for name in section.__struct_fields__]


def _explain_unknown(unknown: str, setting: str, section: type[Section], root: type[Section], path: str) -> tuple[str, str]:
    text = f"{setting} has an unknown setting {unknown!r}."
    if close := difflib.get_close_matches(unknown.upper(), _names(section), n=1, cutoff=0.75):
        return text, f"Did you mean {close[0]}?"
    if paths := [inner_path for inner_path, inner in _sections(root, path) if unknown in _names(inner)]:
        return text, f"It belongs in {' or '.join(paths)}."
    return text, f"Choices are: {', '.join(_names(section))}."


def _sections(kind: type[Section], path: str) -> Iterator[tuple[str, type[Section]]]:
    """Yield a section and the sections below it, each with its path."""
    yield path, kind
    for name, type_ in get_type_hints(kind).items():
        if (inner := _section_of(type_)) is not None:
            entry = "[...]" if get_origin(type_) is dict else ""
            yield from _sections(inner, f'{path}["{name.upper()}"]{entry}')


def _advice(problem: str, type_: Any) -> str:
    if "duration" in problem:
        return "Write timedelta(seconds=...), or an ISO 8601 duration such as 'PT30S'."
    if "Expected a list, got `str`" in problem:
        return 'Write a list: ["..."].'
    section = _section_of(type_)
    if "Expected a dict" in problem and section is not None:
        if get_origin(type_) is dict:
            return 'Write {"NAME": {...}}, an entry for each; {} in the place of {...} keeps its defaults.'
        return f"Write {{}} for its defaults, or set: {', '.join(_names(section))}."
    choices = get_args(type_) if get_origin(type_) is Literal else ()
    for kind in (type_, *get_args(type_)):
        if inspect.isclass(kind) and issubclass(kind, enum.Enum):
            choices = tuple(map(str, kind))
    return f"Choices are: {', '.join(map(repr, choices))}." if choices else ""
