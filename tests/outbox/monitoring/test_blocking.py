"""Sessions that keep others from the outbox: each tool answers in time, and names them."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
import pytest
from django.core.management import CommandError, call_command

from outbox import database
from outbox.database.locks import Lock
from outbox.errors import TablesLocked
from outbox.monitoring import attention, doctor
from outbox.monitoring.attention import read_attention
from outbox.monitoring.blocking import read_blocking
from outbox.monitoring.connection import connected
from outbox.monitoring.health import Health, health
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@contextmanager
def holding(statement: str) -> Iterator[int]:
    """Hold a lock in an idle transaction, as in a forgotten psql; yield the process's number."""
    with database.connect("default", application_name="psql") as session, session.transaction():
        session.execute(statement)
        yield session.info.backend_pid


@contextmanager
def waiting(statement: str, *, name: str) -> Iterator[None]:
    """Let another session wait for a lock."""
    with database.connect("default", application_name=name) as session:

        def wait() -> None:
            with pytest.raises(psycopg.errors.QueryCanceled):
                session.execute(statement)

        thread = threading.Thread(target=wait)
        thread.start()
        try:
            with database.connect("default") as own:
                wait_until(lambda: read_blocking(own, seconds=0.01))
            yield
        finally:
            session.cancel_safe()
            thread.join(20)


@pytest.fixture
def locked() -> Iterator[int]:
    with holding("LOCK TABLE outbox_ticket") as pid:
        yield pid


class TestALockedTable:
    def test_is_named_by_the_status_with_the_command_that_ends_it(self, locked: int, capsys: Any):
        began = time.monotonic()

        with pytest.raises((CommandError, SystemExit)) as error:
            call_command("outbox_status", "--database", "default")

        text = f"{error.value}{capsys.readouterr()}"
        assert time.monotonic() - began < 15
        assert f"locked by session {locked}. It holds locks of the outbox (psql, user" in text
        assert f"SELECT pg_terminate_backend({locked})" in text

    def test_needs_attention_in_the_words_of_health(self, locked: int):
        assert health()["default"] is Health.NEEDS_ATTENTION

    def test_is_named_by_the_doctor(self, locked: int):
        found = [*doctor.check_databases(), *doctor.check_processes()]

        assert [one for one in found if f"session {locked}" in one.text and f"({locked})" in one.hint]

    def test_is_named_on_the_overview(self, locked: int, admin_client: Any):
        page = admin_client.get("/admin/outbox/overview/", follow=True)

        assert page.status_code == 200
        assert f"pg_terminate_backend({locked})" in page.content.decode()

    def test_is_over_when_the_command_was_run(self):
        with (
            suppress(psycopg.errors.AdminShutdown),
            holding("LOCK TABLE outbox_ticket"),
            database.connect("default") as own,
        ):
            [blocking] = read_blocking(own, seconds=0)
            own.execute(blocking.hint.partition("end it: ")[2].rstrip("."))

            wait_until(lambda: not read_blocking(own, seconds=0))


class TestALongStatement:
    def test_ends_in_time_and_is_told_apart_from_a_server_that_is_away(self):
        began = time.monotonic()

        with pytest.raises(TablesLocked, match=r"default.*took longer"), connected("default", "test", statement_seconds=1) as own:
            own.execute("SELECT pg_sleep(60)")

        assert time.monotonic() - began < 10

    def test_is_limited_to_five_seconds_whatever_the_role_may(self):
        with connected("default", "test") as own:
            assert own.execute("SHOW statement_timeout").fetchone() == ("5s",)


class TestAnIdleTransaction:
    def test_that_has_a_key_is_named_with_those_who_wait(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(attention, "BLOCKED_SECONDS", 0.01)
        lock = f"SELECT pg_advisory_xact_lock({Lock.KEY}, 17)"
        with holding(lock) as pid, waiting(lock, name="gunicorn"), database.connect("default") as own:
            [blocked] = [one for one in read_attention(own, "default") if one.id == "outbox.blocked"]

        assert blocked.obj == f"session {pid}"
        assert "(psql, user" in blocked.msg
        assert "for which 1 session waited up to" in blocked.msg
        assert blocked.msg.endswith(": gunicorn.")
        assert f"pg_terminate_backend({pid})" in blocked.hint

    def test_that_has_locks_of_others_is_not(self):
        lock = "SELECT pg_advisory_xact_lock(1, 17)"
        with holding(lock), database.connect("default") as own:
            assert read_blocking(own, seconds=0) == []
