"""
What an operator reads when a process was killed, frozen or stopped: `outbox_status` and the health endpoint, after ten seconds at
most; and that it goes away once it is mended. Real processes, real signals.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from django.db import connection

from outbox import publish_raw, transaction
from outbox.models import Inbox, Process
from tests.database_url import url_of
from tests.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(180)]

WITHIN_SECONDS = 10 + 5  # and what it takes to start a process that asks, on a busy machine

NO_RELAY = "no_relay of broker 'default'"

Run = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def run() -> Iterator[Run]:
    """Run a command of Django's in a process of its own; what still runs at the end is killed."""
    started: list[subprocess.Popen[str]] = []
    environment = {
        **os.environ,
        "DATABASE_URL": url_of(connection.settings_dict),
        "DJANGO_SETTINGS_MODULE": "tests.journeys.attention.settings",
    }

    def run(*command: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen([sys.executable, "-m", "django", *command], env=environment, stdout=-1, stderr=-1, text=True)
        )
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def attention(run: Run) -> Callable[[], dict[str, str]]:
    """Ask `outbox_status`; return what needs attention: kind and subject -> cause. Its exit code says so, too."""

    def attention() -> dict[str, str]:
        asked = run("outbox_status", "--database", "default", "--json")
        output, errors = asked.communicate(timeout=60)
        assert asked.returncode in (0, 1), errors
        [database] = json.loads(output)["databases"]
        found = {f"{one['kind']} of {one['subject']}": one["cause"] for one in database["attention"]}
        assert asked.returncode == bool(found)
        return found

    return attention


@pytest.fixture
def shop(run: Run, attention: Callable[[], dict[str, str]]) -> dict[str, subprocess.Popen[str]]:
    """A relay and a consumer at work, and nothing that needs attention."""
    running = {"relay": run("outbox_relay", "--database", "default"), "consumer": run("outbox_consume")}
    for kind in running:
        wait_until(lambda kind=kind: Process.objects.filter(kind=kind).exists())
    publish("ship")
    wait_until(Inbox.objects.exists)
    assert attention() == {}
    return running


def publish(do: str, count: int = 1) -> None:
    for _ in range(count):
        with transaction():
            publish_raw("orders", {"do": do})


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
class TestAProcess:
    def test_relay_that_is_gone_is_named_and_goes_away_with_the_next(self, how, shop, run, attention):
        shop["relay"].send_signal(how)

        cause = wait_until(lambda: attention().get(NO_RELAY), WITHIN_SECONDS)

        assert cause.startswith("No relay is running: the last heartbeat came ")
        shop["relay"].kill()
        run("outbox_relay", "--database", "default")
        wait_until(lambda: attention() == {})

    def test_consumer_that_is_gone_is_named_when_something_waits(self, how, shop, run, attention):
        shop["consumer"].send_signal(how)
        publish("ship", 3)

        cause = wait_until(lambda: attention().get("no_consumer of group 'shipping'"), WITHIN_SECONDS)

        assert "and 3 messages wait" in cause
        shop["consumer"].kill()
        run("outbox_consume")
        wait_until(lambda: attention() == {})


def test_a_relay_that_is_stopped_is_named_at_once(shop, attention):
    shop["relay"].terminate()
    shop["relay"].communicate(timeout=30)

    assert attention()[NO_RELAY] == "No relay is running."


def test_a_dead_letter_is_named_until_it_is_discarded(shop, run, attention):
    publish("reject")
    cause = wait_until(lambda: attention().get("dead_letters of group 'shipping'"), 60)

    assert cause == "1 message of topic 'orders' failed for good."
    run("outbox_replay", "--all", "--discard", "--no-input").communicate(timeout=60)
    assert attention() == {}


def test_a_database_that_is_away_cannot_be_asked(run):
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.journeys.attention.settings"}
    environment["DATABASE_URL"] = "postgres://nobody@127.0.0.1:1/none"
    asked = subprocess.run([sys.executable, "-m", "django", "outbox_status"], env=environment, capture_output=True, text=True)

    assert asked.returncode == 2
    assert "127.0.0.1" in asked.stderr
