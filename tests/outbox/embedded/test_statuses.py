"""What each class of PostgreSQL's errors means for a send: the table of docs/guarantees.md, row by row. Needs no server."""

import psycopg
import pytest
from psycopg import errors

from outbox.brokers.base import SendStatus
from outbox.embedded.client import status_of

UNAVAILABLE, MISCONFIGURED = SendStatus.UNAVAILABLE, SendStatus.MISCONFIGURED
REFUSED, UNSURE = SendStatus.REFUSED, SendStatus.UNSURE

STATES = [
    ("42P01", MISCONFIGURED),  # undefined table
    ("42703", MISCONFIGURED),  # undefined column
    ("42501", MISCONFIGURED),  # insufficient privilege
    ("42883", MISCONFIGURED),  # undefined function
    ("3F000", MISCONFIGURED),  # invalid schema name
    ("0A000", MISCONFIGURED),  # feature not supported
    ("55000", MISCONFIGURED),  # object not in prerequisite state
    ("22021", REFUSED),  # character not in repertoire
    ("54000", REFUSED),  # program limit exceeded
    ("25006", UNAVAILABLE),  # read-only transaction
    ("40001", UNAVAILABLE),  # serialization failure
    ("40P01", UNAVAILABLE),  # deadlock
    ("53100", UNAVAILABLE),  # disk full
    ("53300", UNAVAILABLE),  # too many connections
    ("55P03", UNAVAILABLE),  # lock not available
    ("57014", UNAVAILABLE),  # query canceled
    ("23514", UNAVAILABLE),  # no partition
    ("57P01", UNSURE),  # admin shutdown
    ("08006", UNSURE),  # connection failure
]


class TestErrorOfPostgreSQL:
    @pytest.mark.parametrize(("state", "status"), STATES, ids=[state for state, _ in STATES])
    def test_is_an_outage_or_a_refusal(self, state: str, status: SendStatus):
        assert status_of(errors.lookup(state)("no")) is status

    def test_without_a_state_is_unsure(self):
        assert status_of(psycopg.OperationalError("the connection is lost")) is UNSURE
