"""Real relay processes on the test's database."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outbox import atomic, database, publish_raw
from outbox.failpoints import VARIABLE
from tests.database_url import environment_of

Start = Callable[..., subprocess.Popen[str]]
TOPIC = "orders"
SETTINGS = "tests.outbox.management.settings"


@pytest.fixture(autouse=True)
def _no_wakeup(settings: Any) -> None:
    settings.OUTBOX = {**settings.OUTBOX, "CELERY_WAKEUP": False}


@pytest.fixture
def own() -> Iterator[database.Connection]:
    with database.connect("default") as own:
        own.execute("DELETE FROM outbox_wakeup")
        yield own
        own.execute("DELETE FROM outbox_wakeup")


@pytest.fixture
def publish() -> Callable[[int], list[Any]]:
    """Publish so many messages, each in a transaction of its own; return their ids."""

    def publish(count: int) -> list[Any]:
        ids = []
        for number in range(count):
            with atomic():
                ids.append(publish_raw(TOPIC, {"number": number}).message_id)
        return ids

    return publish


@pytest.fixture
def start(own: database.Connection) -> Iterator[Start]:
    """
    Start `manage.py outbox_relay`; whatever still runs at the end of the test is killed.

    Before `own` clears the wakeup rows: a relay that lived on wrote one again, and the next test took it for its own relay's.
    """
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, failpoints: str = "", settings: str = SETTINGS) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "django", "outbox_relay", "--database", "default", "--json", *arguments]
        environment = environment_of(settings, **{VARIABLE: failpoints})
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
