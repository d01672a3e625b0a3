"""OPTIONS of the embedded broker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

import msgspec
from django.db import connections

from outbox.brokers.base import Problem
from outbox.brokers.options import Options, problems_with, read_options

CONNECT_TIMEOUT = timedelta(seconds=5)
MOST_INTERVALS = 16  # as TAKE_DUE_HALVES doubles them


class EmbeddedOptions(Options, frozen=True):
    """Where the tables live, and when half messages are asked about."""

    database: str = "default"  # an alias of DATABASES
    start: Literal["earliest", "latest"] = "earliest"  # where a group begins in a topic that is new to it
    check_after: timedelta = timedelta(seconds=6)  # the first ask; above the longest batch of a relay
    check_interval: timedelta = timedelta(seconds=10)  # before the second ask; doubled each time, at most 16-fold
    check_limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 15  # asked so often, a half is parked
    statement_timeout: timedelta = timedelta(seconds=10)  # a batch is stored by two statements at most
    clock: Callable[[], datetime] | None = None  # for tests; else the database's

    @property
    def max_send_duration(self) -> timedelta:
        """A batch of messages with and without a time is two statements; the connection may have to be opened first."""
        return CONNECT_TIMEOUT + 2 * self.statement_timeout

    @property
    def max_check_back_age(self) -> timedelta:
        """From its birth to the moment when a half message that nobody ended is parked."""
        waits = [min(1 << asked, MOST_INTERVALS) for asked in range(self.check_limit)]
        return self.check_after + self.check_interval * sum(waits)


def problems(raw: Mapping[str, Any]) -> list[Problem]:
    """Return what is wrong with the options: names and types first, then what they point to."""
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
    elif "DATABASE" in raw and (vendor := connections[options.database].vendor) != "postgresql":  # E007 names the default
        found.append(
            Problem(
                f'OPTIONS["DATABASE"] is {options.database!r}, which is {vendor}.',
                "The embedded broker keeps its tables in PostgreSQL only. Name such a database.",
            )
        )
    found.extend(
        Problem(f'OPTIONS["{name.upper()}"] is {getattr(options, name)}; it must be greater than zero.', "Correct it.")
        for name in ("check_after", "check_interval", "statement_timeout")
        if getattr(options, name) <= timedelta()
    )
    return found
