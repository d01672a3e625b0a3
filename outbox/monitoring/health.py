"""Health in one word for each database: for load balancers, orchestrators and monitors, which know two answers."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import psycopg

from outbox.database import Connection
from outbox.errors import NotMigrated
from outbox.monitoring.connection import connected
from outbox.monitoring.status import read_status
from outbox.relay.hosts import databases

STATEMENT_SECONDS = 3  # as long as a load balancer waits


class Health(StrEnum):
    """How one database does. No more is said: anybody may ask."""

    OK = "ok"
    NEEDS_ATTENTION = "needs attention"  # `manage.py outbox_status` lists it
    UNREACHABLE = "unreachable"
    UNFIT = "unfit"  # without our tables, or a replica


def readiness() -> dict[str, Health]:
    """Return for each database whether this process can publish to it: OK, UNREACHABLE or UNFIT."""
    return {alias: _ask(alias, _is_fit) for alias in databases()}


def health() -> dict[str, Health]:
    """Return for each database whether something needs attention."""
    return {alias: _ask(alias, _is_well) for alias in databases()}


def _ask(alias: str, question: Callable[[str, Connection], Health]) -> Health:
    try:
        with connected(alias, "outbox health", statement_seconds=STATEMENT_SECONDS) as connection:
            return question(alias, connection)
    except NotMigrated:
        return Health.UNFIT
    except psycopg.Error:
        return Health.UNREACHABLE


def _is_fit(alias: str, connection: Connection) -> Health:
    return Health.OK


def _is_well(alias: str, connection: Connection) -> Health:
    return Health.NEEDS_ATTENTION if read_status(connection, alias).attention else Health.OK
