"""A PostgreSQL of the set-ups' own, a replica of it, a pooler before it, and the shop as a program."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psycopg
import pytest
from django.conf import settings

from outbox.testing.postgres import Postgres
from outbox.testing.programs import as_user, owner_of_server
from project.servers.pgbouncer import PgBouncer
from tests.waiting import wait_until

Play = Callable[..., str]


def as_role(url: str, role: str) -> str:
    """Return the URL of the same database for another role."""
    return url.replace("//postgres@", f"//{role}@")


def run(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Make a folder of the user who runs PostgreSQL, whose path is short enough for a socket."""
    folder = Path(tempfile.mkdtemp(prefix="outbox-setups-"))
    if owner := owner_of_server():
        os.chown(folder, owner.pw_uid, owner.pw_gid)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="package")
def server() -> Iterator[Postgres]:
    """Start a server that waits for the disk, as the doctor asks, and keeps in its log what logical replicas need."""
    with tempfile.TemporaryDirectory(prefix="outbox-setups-") as home, Postgres(home, durable=True) as server:
        run(server.url, "ALTER SYSTEM SET wal_level = logical")
        run(
            server.url,
            "CREATE ROLE shop_owner",
            "CREATE ROLE deploy LOGIN NOINHERIT IN ROLE shop_owner",
            "CREATE ROLE shop_app LOGIN",
        )
        server.stop()
        server.start()
        yield server


@pytest.fixture
def databases(server: Postgres, request: pytest.FixtureRequest) -> Iterator[Callable[[str], str]]:
    """Make databases; a call returns the URL of a new one."""
    made: list[str] = []

    def make(name: str) -> str:
        made.append(name)
        run(server.url, f'CREATE DATABASE "{name}" OWNER shop_owner')
        return server.url_of(name)

    yield make
    for name in made:
        run(server.url, f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.fixture
def replica(server: Postgres, folder: Path) -> Iterator[Postgres]:
    """Start a physical replica, which accepts no writes."""
    assert server.programs is not None
    source = [f"--host={server.home}", "--username=postgres"]
    copy = [server.programs / "pg_basebackup", *source, "--checkpoint=fast", "--write-recovery-conf", f"--pgdata={folder}/data"]
    subprocess.run(copy, check=True, cwd=folder, **as_user(owner_of_server()))
    with Postgres(folder) as replica:
        yield replica


@pytest.fixture
def pooler(server: Postgres) -> Iterator[PgBouncer]:
    if not PgBouncer.is_here():
        pytest.skip("There is no pgbouncer: apt-get install pgbouncer.")
    with PgBouncer(server.url) as pooler:
        yield pooler


@pytest.fixture
def play() -> Play:
    """Play acts of the shop in a set-up; return what the program said."""

    def play(setup: str, url: str, *acts: str, python: str = sys.executable, before: Sequence[str] = (), **variables: str) -> str:
        done = subprocess.run(
            [*before, python, "-m", "tests.setups.play", *acts],
            cwd=settings.BASE_DIR,
            env={**os.environ, "SETUP": setup, "DATABASE_URL": url, **variables},
            capture_output=True,
            text=True,
            timeout=120,
        )
        print(f"{setup}: {done.stdout}")  # noqa: T201
        assert done.returncode == 0, f"{setup}:\n{done.stdout}{done.stderr}"
        return done.stdout

    return play


def caught_up(url: str, query: str, expected: list[tuple[object, ...]]) -> None:
    """Wait until a logical replica has rows."""
    with psycopg.connect(url, autocommit=True) as connection:
        wait_until(lambda: connection.execute(query).fetchall() == expected, 20)
