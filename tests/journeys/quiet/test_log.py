"""Outages and errors that stay, each for 20 s against relay, maintenance and consumer: all at once, to count their log lines."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.conf import settings

from outbox.logs import without_numbers
from project.servers.rabbitmq import RabbitMQ
from project.servers.redis import Redis
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.redis,
    pytest.mark.rabbitmq,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not Redis.is_here(), reason="There is no redis-server: apt-get install redis-server."),
    pytest.mark.skipif(not RabbitMQ.is_here(), reason="There is no rabbitmq-server: apt-get install rabbitmq-server."),
]

SECONDS = 20
RECORD = re.compile(r"^(WARNING|ERROR|CRITICAL) (\S+) ", re.MULTILINE)
TRACEBACK = "Traceback (most recent call last):"
RELAY = ["manage.py", "outbox_relay"]
CONSUME = ["manage.py", "outbox_consume"]
FILL = ["-m", "tests.journeys.quiet.fill"]
PUBLISH = [*FILL, "for ever"]

# What is tried: SQL that breaks the database, if any; the processes; the words that each of their logs has.
OUTAGES = {
    "postgresql is away": ("", [RELAY, CONSUME], "refused"),
    "postgresql is read-only": ("", [RELAY, CONSUME], "read-only transaction"),
    "the role may only read": ("", [RELAY, CONSUME], "permission denied"),
    "a table of the relay is missing": ("ALTER TABLE outbox_ticket RENAME TO elsewhere", [RELAY], "does not exist"),
    "the inbox is missing": ("ALTER TABLE outbox_inbox RENAME TO elsewhere", [CONSUME], "does not exist"),
    "the handler always fails": ("", [RELAY, CONSUME], ""),
    "rabbitmq is away": ("", [RELAY, CONSUME], "RabbitMQ"),
    "redis is away": ("", [RELAY, PUBLISH], "Celery"),
}


class Play:
    """The processes of one outage, on a database of their own."""

    def __init__(self, folder: Path, url: str, outage: str, broker_url: str) -> None:
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._folder = folder
        self._environment = environment(url, OUTAGE=outage, BROKER_URL=broker_url)

    def start(self, command: list[str]) -> None:
        with self._log(command[1]).open("wb") as log:
            arguments = [sys.executable, *command]
            self.processes[command[1]] = subprocess.Popen(
                arguments, cwd=settings.BASE_DIR, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )

    def said(self) -> dict[str, str]:
        return {name: self._log(name).read_text() for name in self.processes}

    def has_begun(self) -> bool:
        """Return whether each command has printed its first line."""
        return all(self._log(name).read_text() for name in self.processes if name.startswith("outbox_"))

    def close(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGKILL)
            process.wait()

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"


def environment(url: str, **variables: str) -> dict[str, str]:
    return {**os.environ, "DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "tests.journeys.quiet.settings", **variables}


def fill(url: str) -> None:
    subprocess.run([sys.executable, *FILL], cwd=settings.BASE_DIR, env=environment(url), check=True)


@pytest.fixture
def filled(fresh_database: str) -> str:
    """A database with messages and tasks that wait; return its URL."""
    fill(fresh_database)
    return fresh_database


@pytest.fixture
def copies(filled: str) -> Iterator[dict[str, str]]:
    """A copy of the database for each outage, broken as it is broken there."""
    name = re.search(r"/([^/?]+)\?", filled)[1]
    urls = {outage: filled.replace(f"/{name}?", f"/{name}_{number}?") for number, outage in enumerate(OUTAGES)}
    with psycopg.connect(filled.replace(f"/{name}?", "/postgres?"), autocommit=True) as server:
        server.execute("CREATE ROLE outbox_quiet_reader")
        with psycopg.connect(filled) as own:
            own.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO outbox_quiet_reader")
        for number, (outage, (breaks, _, _)) in enumerate(OUTAGES.items()):
            server.execute(f'CREATE DATABASE "{name}_{number}" TEMPLATE "{name}"')
            with psycopg.connect(urls[outage]) as own:
                own.execute(breaks)
        yield urls
        for number in range(len(OUTAGES)):
            server.execute(f'DROP DATABASE "{name}_{number}" WITH (FORCE)')
        with psycopg.connect(filled) as own:
            own.execute("DROP OWNED BY outbox_quiet_reader")
        server.execute("DROP ROLE outbox_quiet_reader")


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[dict[str, Future[Any]]]:
    """Servers that start while the databases are filled; each under the outage in which it is killed."""
    made = {"rabbitmq is away": RabbitMQ(tmp_path / "rabbitmq"), "redis is away": Redis(tmp_path / "redis")}
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        for name in ("rabbitmq", "redis"):
            (tmp_path / name).mkdir()
        yield {outage: pool.submit(stack.enter_context, server) for outage, server in made.items()}


@pytest.fixture
def plays(servers: dict[str, Future[Any]], copies: dict[str, str], tmp_path: Path) -> Iterator[dict[str, Play]]:
    """All outages have lasted for 20 s; the servers were killed when the processes had begun."""
    rabbitmq, redis = (servers[outage].result() for outage in ("rabbitmq is away", "redis is away"))
    urls = {"rabbitmq is away": rabbitmq.address, "redis is away": redis.url}
    plays: dict[str, Play] = {}
    try:
        for number, (outage, (_, commands, _)) in enumerate(OUTAGES.items()):
            folder = tmp_path / str(number)
            folder.mkdir()
            plays[outage] = play = Play(folder, copies[outage], outage, urls.get(outage, ""))
            for command in commands:
                play.start(command)
        for play in plays.values():
            wait_until(play.has_begun)
        rabbitmq.kill()
        redis.kill()
        fill(copies["rabbitmq is away"])  # its relay may have sent all
        time.sleep(SECONDS)  # the duration is what is tested
        yield plays
    finally:
        for play in plays.values():
            play.close()


class TestTheLog:
    def test_has_few_lines_and_each_once_in_any_outage(self, plays):
        said = {(outage, name): text for outage, play in plays.items() for name, text in play.said().items()}

        ended = {key: said[key][-2000:] for key in said if plays[key[0]].processes[key[1]].poll() is not None}
        lines = {key: records(text) for key, text in said.items()}
        repeated = {key: [line for line, n in Counter(found).items() if n > 1] for key, found in lines.items()}
        silent = [key for key in said if OUTAGES[key[0]][2] not in said[key]]
        report = {key: (len(found), said[key].count(TRACEBACK)) for key, found in lines.items()}

        assert ended == {}
        assert silent == []
        assert {key: found for key, found in repeated.items() if found} == {}
        assert max(number for number, _ in report.values()) <= SECONDS / 2, report
        assert max(number for _, number in report.values()) <= 6, report


def records(text: str) -> list[str]:
    """Return the records in a log, without ids and numbers."""
    return [without_numbers(line) for line in text.splitlines() if RECORD.match(line)]
