"""OPTIONS of the embedded broker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

import msgspec
from django.db import connections

from outbox.brokers.base import Problem
from outbox.brokers.options import Options, problems_with, read_options


class EmbeddedOptions(Options, frozen=True):
    """Where the tables live, and when half messages are asked about."""

    database: str = "default"  # an alias of DATABASES
    start: Literal["earliest", "latest"] = "earliest"  # where a group begins in a topic that is new to it
    check_after: timedelta = timedelta(seconds=6)  # the first ask; above the longest batch of a relay
    check_interval: timedelta = timedelta(seconds=10)  # before the second ask; doubled each time, at most 16-fold
    check_limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 15  # asked so often, a half is parked
    statement_timeout: timedelta = timedelta(seconds=30)
    connect_timeout: timedelta = timedelta(seconds=5)
    clock: Callable[[], datetime] | None = None  # for tests; else the database's


def problems(raw: Mapping[str, Any]) -> list[Problem]:
    """Say what is wrong with the options: names and types first, then what they point to."""
    if found := problems_with(EmbeddedOptions, raw):
        return found
    options = read_options(EmbeddedOptions, raw)
    if options.database not in connections.settings:
        known = ", ".join(sorted(connections.settings))
        found.append(
            Problem(
                f'OPTIONS["DATABASE"] is {options.database!r}, which is not in DATABASES.',
                f'Name one of {known}. Without it, the tables are looked for in "default".',
            )
        )
    found.extend(
        Problem(f'OPTIONS["{name.upper()}"] is {getattr(options, name)}; it must be longer than nothing.', "Correct it.")
        for name in ("check_after", "check_interval", "statement_timeout", "connect_timeout")
        if getattr(options, name) <= timedelta()
    )
    return found
