"""Health of each database in one word, for load balancers, orchestrators and monitors."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import partial

import psycopg

from outbox.database import Connection
from outbox.errors import NotMigrated, TablesLocked
from outbox.monitoring.attention import read_attention
from outbox.monitoring.connection import connected
from outbox.monitoring.status import is_read_only
from outbox.relay.hosts import databases

STATEMENT_SECONDS = 3  # the timeout of each statement, as short as usual timeouts of load balancers


class Health(StrEnum):
    """The health of one database. It has no details, because anyone may ask for it."""

    OK = "ok"
    NEEDS_ATTENTION = "needs attention"  # `manage.py outbox_status` lists it
    UNREACHABLE = "unreachable"
    UNFIT = "unfit"  # it is a replica, has no tables of the outbox, or has tables of another project
    READ_ONLY = "read only"


def readiness() -> dict[str, Health]:
    """
    Return for each database whether this process can publish to it: OK, UNREACHABLE, UNFIT or READ_ONLY.

    NEEDS_ATTENTION means that a lock or a timeout stopped the query. Nothing is written, so a full disk is not noticed.
    """
    return {alias: _ask(alias, is_read_only, Health.READ_ONLY) for alias in databases()}


def health() -> dict[str, Health]:
    """Return for each database whether something needs attention."""
    return {alias: _ask(alias, partial(read_attention, alias=alias), Health.NEEDS_ATTENTION) for alias in databases()}


def _ask(alias: str, question: Callable[[Connection], object], trouble: Health) -> Health:
    """Return the health of a database: `trouble` if the answer to `question` is true or not empty."""
    try:
        with connected(alias, "outbox health", statement_seconds=STATEMENT_SECONDS) as connection:
            return trouble if question(connection) else Health.OK
    except NotMigrated:
        return Health.UNFIT
    except TablesLocked:
        return Health.NEEDS_ATTENTION
    except psycopg.Error:
        return Health.UNREACHABLE
