"""A database with an outbox to be monitored."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from django.db import connection

from tests.database_url import url_of
from tests.waiting import wait_until

SOURCE = "SELECT id FROM outbox_source"
OWN_ID = "SELECT pg_current_xact_id()::text::bigint"
HORIZON = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint"


def settle(url: str) -> None:
    """Wait until all transactions have ended that began before, in all databases of the server: others' tests, perhaps."""
    with psycopg.connect(url, autocommit=True) as looker:
        (own,) = looker.execute(OWN_ID).fetchone()
        wait_until(lambda: looker.execute(HORIZON).fetchone()[0] > own, 60)


@pytest.fixture
def url(transactional_db: None) -> str:
    return url_of(connection.settings_dict)


@pytest.fixture
def source(transactional_db: None) -> str:
    with connection.cursor() as cursor:
        cursor.execute(SOURCE)
        (found,) = cursor.fetchone()
    return found


@pytest.fixture
def late(url: str) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """A connection whose transaction takes its time."""
    with psycopg.connect(url) as found:
        yield found
