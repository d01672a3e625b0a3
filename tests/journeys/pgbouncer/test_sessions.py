"""What needs a session of its own goes around the pooler, and refuses to start where no alias leads there."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from django.core.checks import CheckMessage, run_checks
from django.core.management import CommandError, call_command
from django.db import connections

from outbox import database
from outbox.errors import ConfigurationError
from outbox.models import MessageState, Process
from outbox.pipeline import runs
from project.servers.pgbouncer import PgBouncer
from tests.journeys.pgbouncer.test_shared import publish_orders
from tests.waiting import wait_until

pytestmark = [pytest.mark.pgbouncer, pytest.mark.usefixtures("pooled")]

LINE = 'OUTBOX["DIRECT_DATABASES"] = {"default": "direct"}'


def found() -> list[CheckMessage]:
    """Return what the system checks say of poolers."""
    return [one for one in run_checks(databases=["default"]) if one.id in ("outbox.W025", "outbox.E044", "outbox.E045")]


@pytest.fixture
def without_direct(pooled: None, settings: Any) -> None:
    settings.OUTBOX = {**settings.OUTBOX, "DIRECT_DATABASES": {}}


@pytest.fixture
def direct_is_pooled(pooled: None, pooler: PgBouncer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lead "direct" through the pooler, too."""
    for name in ("HOST", "PORT"):
        monkeypatch.setitem(connections.settings["direct"], name, connections.settings["default"][name])


@pytest.fixture
def environment(pooler: PgBouncer, direct_url: str, pooled: None) -> dict[str, str]:
    """What a process of the shop behind the pooler needs."""
    return {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.journeys.pgbouncer.settings",
        "DATABASE_URL": pooler.url_of(connections["default"].settings_dict["NAME"]),
        "DIRECT_DATABASE_URL": direct_url,
    }


@pytest.fixture
def relay(environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-m", "django", "outbox_relay"], env=environment)
    yield process
    process.kill()
    process.wait()


class TestARelay:
    def test_works_around_the_pooler(self, relay, left_behind):
        wait_until(lambda: Process.objects.filter(kind="relay").exists())

        for number in range(5):
            publish_orders([number])
        wait_until(lambda: MessageState.objects.filter(topic="orders", state="sent").count() == 5)
        relay.send_signal(signal.SIGTERM)

        assert relay.wait(60) == 0
        assert left_behind() == []

    def test_names_the_line_to_write_and_ends(self, environment):
        del environment["DIRECT_DATABASE_URL"]

        ended = subprocess.run(
            [sys.executable, "-m", "django", "outbox_relay"], env=environment, capture_output=True, text=True, timeout=30
        )

        assert ended.returncode == 2
        assert LINE in ended.stderr


@pytest.mark.usefixtures("without_direct")
class TestWithoutADirectAlias:
    @pytest.mark.parametrize("command", ["outbox_relay", "outbox_record", "outbox_maintenance", "outbox_archive", "outbox_audit"])
    def test_a_command_refuses_and_names_the_line_to_write(self, command, settings, tmp_path):
        brokers = {"default": {"BACKEND": "outbox.brokers.memory.MemoryBroker"}}
        archive = {"ARCHIVE": {"PATH": str(tmp_path)}}
        settings.OUTBOX = {**settings.OUTBOX, "BROKERS": brokers, "PIPELINE": archive}

        with pytest.raises(CommandError) as refused:
            call_command(command)

        assert refused.value.returncode == 2
        assert LINE in str(refused.value)

    def test_an_audit_takes_no_lock(self, left_behind):
        with pytest.raises(ConfigurationError, match="DIRECT_DATABASES"), runs.audit_lock("default"):
            pass

        assert left_behind() == []

    def test_the_check_names_the_same_line(self):
        (problem,) = found()

        assert problem.id == "outbox.W025"
        assert LINE in problem.hint


class TestADirectAlias:
    def test_is_all_that_the_check_wants(self):
        assert found() == []

    @pytest.mark.usefixtures("direct_is_pooled")
    def test_that_leads_through_the_pooler_is_refused(self):
        (problem,) = found()
        with pytest.raises(ConfigurationError) as refused:
            database.connect_session("default")

        assert problem.id == "outbox.W025"
        assert str(refused.value) == f"{problem.msg} {problem.hint}"
        assert "DATABASES['direct']" in problem.hint

    def test_that_leads_to_another_database_is_found(self, monkeypatch):
        monkeypatch.setitem(connections.settings["direct"], "NAME", "postgres")

        (problem,) = found()

        assert problem.id == "outbox.E045"
        assert problem.hint

    def test_is_no_second_database_with_messages(self):
        assert "direct" not in database.outbox_databases()
