"""OPTIONS of a broker as one typed object."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from outbox.errors import ConfigurationError
from outbox.findings import Finding, wrong_option
from outbox.sections import Section, convert, wrong_durations


class BrokerOptions(Section, frozen=True):
    """Base class of a broker's options."""


O = TypeVar("O", bound=BrokerOptions)  # noqa: E741


def read_options(kind: type[O], raw: Mapping[str, Any]) -> O:
    """
    Turn OPTIONS into the typed options of a broker.

    Raises:
        ConfigurationError: a name is unknown, or a value is wrong; the text names it.
    """
    try:
        return convert(dict(raw), kind, "OPTIONS")
    except ConfigurationError as error:
        raise ConfigurationError(f'OUTBOX["BROKERS"] has wrong OPTIONS ({kind.__name__}): {error.message}', error.hint) from error


def problems_with(kind: type[BrokerOptions], raw: Mapping[str, Any]) -> list[Finding]:
    """Return the error that `read_options` would raise; if there is none, durations that are too short or too long."""
    try:
        options = convert(dict(raw), kind, "OPTIONS")
    except ConfigurationError as error:
        return [wrong_option(error.message, error.hint or "Correct it.")]
    return [wrong_option(problem, "Correct it.") for problem in wrong_durations(options, "OPTIONS")]


ADDRESS = re.compile(r"(?P<host>[^:\s]+|\[[0-9a-fA-F:]+\])(:(?P<port>\d{1,5}))?")


def read_address(text: str) -> tuple[str, int | None] | None:
    """Return the host and the port of "host:port", "host" or "[::1]:port". None: it is not an address."""
    match = ADDRESS.fullmatch(text)
    if match is None or (match["port"] and not 0 < int(match["port"]) < 65_536):
        return None
    return match["host"].strip("[]"), int(match["port"]) if match["port"] else None
