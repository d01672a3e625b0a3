"""The test's database behind a real PgBouncer in transaction mode, whose few backends all connections share."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from django.db import connections

from outbox import topics
from outbox.check_backs import sources
from outbox.half_first.producers import close_idle
from project.servers.pgbouncer import PgBouncer
from project.servers.program import HOST
from tests.database_url import url_of

POOL_SIZE = 4

DIRECT: dict[str, Any] = {}  # one for all tests: Django keeps the first that it has seen of an alias

# What PgBouncer itself sets: it knows these of each of its clients.
TRACKED = ["application_name", "client_encoding", "DateStyle", "TimeZone", "standard_conforming_strings"]

LEFT_BEHIND = """
SELECT name || ' = ' || setting FROM pg_settings WHERE source = 'session' AND name <> ALL(%s)
UNION ALL SELECT 'prepared: ' || statement FROM pg_prepared_statements
UNION ALL SELECT 'LISTEN ' || pg_listening_channels()
UNION ALL SELECT format('lock (%%s, %%s)', classid, objid) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()
UNION ALL SELECT 'temporary table ' || relname FROM pg_class WHERE relnamespace = pg_my_temp_schema()
"""


@pytest.fixture(scope="module")
def pooler(django_db_setup: None) -> Iterator[PgBouncer]:
    if not PgBouncer.is_here():
        pytest.skip("There is no pgbouncer: apt-get install pgbouncer.")
    with PgBouncer(url_of(connections["default"].settings_dict), pool_size=POOL_SIZE) as pooler:
        yield pooler


@pytest.fixture
def direct_url(transactional_db: None) -> str:
    return url_of(connections["default"].settings_dict)


@pytest.fixture
def pooled(direct_url: str, pooler: PgBouncer, monkeypatch: pytest.MonkeyPatch, settings: Any) -> Iterator[None]:
    """Lead "default" through the pooler, and "direct" around it."""
    connections.close_all()
    default = connections["default"].settings_dict
    DIRECT.update(default, OPTIONS={**default["OPTIONS"]})
    monkeypatch.setitem(connections.settings, "direct", DIRECT)
    monkeypatch.setitem(default, "HOST", HOST)
    monkeypatch.setitem(default, "PORT", pooler.port)
    monkeypatch.setitem(default, "DISABLE_SERVER_SIDE_CURSORS", True)
    monkeypatch.delitem(default["OPTIONS"], "prepare_threshold")
    monkeypatch.setattr(sources, "_aliases", {})
    settings.OUTBOX = {
        **settings.OUTBOX,
        "TOPICS": {**settings.OUTBOX["TOPICS"], "ordered": {"TYPE": "fifo"}},
        "DIRECT_DATABASES": {"default": "direct"},
    }
    topics.forget("default")
    yield
    close_idle()
    connections.close_all()
    topics.forget("default")


@pytest.fixture
def left_behind(pooled: None, pooler: PgBouncer) -> Callable[[], list[str]]:
    """Look at every backend of the pool; return what a connection has left there."""
    url = pooler.url_of(connections["default"].settings_dict["NAME"])

    def left_behind() -> list[str]:
        with ExitStack() as stack:
            opened = [stack.enter_context(psycopg.connect(url, prepare_threshold=None)) for _ in range(POOL_SIZE)]
            # Each holds a backend as long as its transaction is open.
            backends = {one.execute("SELECT pg_backend_pid()").fetchone() for one in opened}
            assert len(backends) == POOL_SIZE
            return [what for one in opened for (what,) in one.execute(LEFT_BEHIND, [TRACKED])]

    return left_behind
