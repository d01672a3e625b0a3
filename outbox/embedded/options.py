"""OPTIONS of the embedded broker."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any, Literal

import msgspec
from django.apps import apps
from django.db import connections, router

from outbox.brokers.options import BrokerOptions, problems_with, read_options
from outbox.findings import Finding, wrong_option

CONNECT_TIMEOUT = timedelta(seconds=5)
MAX_BACKOFF_FACTOR = 16  # the same limit as in checks.TAKE_DUE_HALVES


class EmbeddedOptions(BrokerOptions, frozen=True):
    """Where the embedded broker keeps its tables, and when it checks back."""

    database: str = "default"  # an alias of DATABASES
    start: Literal["earliest", "latest"] = "earliest"  # where a group begins to read a topic
    check_after: timedelta = timedelta(seconds=6)  # age at the first check-back; longer than a relay takes to commit a batch
    check_interval: timedelta = timedelta(seconds=10)  # from the first check-back to the second; doubles each time, up to 16-fold
    check_limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 15  # number of check-backs after which a half message is parked
    statement_timeout: timedelta = timedelta(seconds=10)  # of each statement

    @property
    def max_send_duration(self) -> timedelta:
        """The maximum duration of a send, which may open the connection, read the topics, and store the batch."""
        return CONNECT_TIMEOUT + 2 * self.statement_timeout

    @property
    def max_check_back_age(self) -> timedelta:
        """The age at which a half message that was not ended is parked."""
        factors = [min(1 << asked, MAX_BACKOFF_FACTOR) for asked in range(self.check_limit)]
        return self.check_after + self.check_interval * sum(factors)


def problems(raw: Mapping[str, Any]) -> list[Finding]:
    """Return wrong names and types of options; if there are none, wrong values."""
    if findings := problems_with(EmbeddedOptions, raw):
        return findings
    options = read_options(EmbeddedOptions, raw)
    if options.database not in connections.settings:
        known = ", ".join(sorted(connections.settings))
        findings.append(
            wrong_option(
                f'OPTIONS["DATABASE"] is {options.database!r}, which is not in DATABASES.',
                f'Choices are: {known}. The default is "default".',
            )
        )
    elif connections[options.database].vendor != "postgresql" and options.database != router.db_for_write(
        apps.get_model("outbox", "MessageRow")  # E007 reports its database
    ):
        findings.append(
            wrong_option(
                f'OPTIONS["DATABASE"] is {options.database!r}, which is not PostgreSQL.',
                'Name a PostgreSQL database of DATABASES. The default is "default".',
            )
        )
    return findings
