"""OPTIONS of a broker as one typed object: names are in capitals, unknown names are rejected."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TypeVar

import msgspec

from outbox.durations import problem_of_duration
from outbox.errors import ConfigurationError
from outbox.findings import Finding, wrong_option
from outbox.message import prepare


class BrokerOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename=str.upper):
    """Base of a broker's options."""


O = TypeVar("O", bound=BrokerOptions)  # noqa: E741


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
            f'OUTBOX["BROKERS"] has wrong OPTIONS ({kind.__name__}): {_explain(error)}.', hint=_hint(kind, str(error))
        ) from error


def problems_with(kind: type[BrokerOptions], raw: Mapping[str, Any]) -> list[Finding]:
    """Return what `read_options` would raise, and durations that are too short or too long, with a hint."""
    prepare(kind)
    try:
        options = msgspec.convert(dict(raw), kind)
    except msgspec.ValidationError as error:
        return [wrong_option(f"{_explain(error)}.", _hint(kind, str(error)) or _advice(kind, str(error)))]
    values = {name: getattr(options, name) for name in kind.__struct_fields__}
    wrong = {name: problem_of_duration(name, value) for name, value in values.items() if isinstance(value, timedelta)}
    return [
        wrong_option(f'OPTIONS["{name.upper()}"] is {values[name]}; {problem}', "Correct it.")
        for name, problem in wrong.items()
        if problem
    ]


ADDRESS = re.compile(r"(?P<host>[^:\s]+|\[[0-9a-fA-F:]+\])(:(?P<port>\d{1,5}))?")


def read_address(text: str) -> tuple[str, int | None] | None:
    """Return the host and the port of "host:port", "host" or "[::1]:port". None: it is not an address."""
    match = ADDRESS.fullmatch(text)
    if match is None or (match["port"] and not 0 < int(match["port"]) < 65_536):
        return None
    return match["host"].strip("[]"), int(match["port"]) if match["port"] else None


def _explain(error: msgspec.ValidationError) -> str:
    """Return an error of msgspec in the terms of the settings file: `OPTIONS["NODES"]`, not `$.NODES`."""
    text = str(error)
    if "missing required field" in text:
        return f"OPTIONS has no {text.split('`')[1]}, which is required"
    if "unknown field" in text:
        return f"OPTIONS has an unknown name {text.split('`')[1]!r}"
    what, _, where = text.partition(" - at `$.")
    if not where:
        return f"OPTIONS: {text}"
    name, rest = re.split(r"(?=[.\[]|`$)", where, maxsplit=1)
    return f'OPTIONS["{name}"]{rest.rstrip("`")} has a wrong value: {what}'


def _advice(kind: type[BrokerOptions], text: str) -> str:
    if "field" in text:
        return f"Choices are: {', '.join(name.upper() for name in kind.__struct_fields__)}."
    if "Expected `array`, got `str`" in text:
        return 'Write a list: ["..."].'
    return "Write timedelta(seconds=...)." if "duration" in text else "Correct it."


def _hint(kind: type[BrokerOptions], text: str) -> str:
    if "unknown field" not in text:
        return ""
    known = [name.upper() for name in kind.__struct_fields__]
    close = difflib.get_close_matches(text.split("`")[1].upper(), known, n=1)
    return f"Did you mean {close[0]}?" if close else ""
