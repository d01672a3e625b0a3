"""Each command on a database that was not migrated, is away, or is a real replica: an exit code and a sentence, no traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from docs.blocks.commands import names
from outbox.testing.postgres import Postgres
from tests.outbox.management.all_commands import CALLS

pytestmark = pytest.mark.slow

NEED_NO_DATABASE = {"outbox_checker", "outbox_record", "outbox_seek"}  # on the embedded broker there is nothing for them to do
MAY_READ_A_REPLICA = {"outbox_audit", "outbox_topics"}
SETTINGS = "tests.outbox.management.settings"


def in_django(url, *arguments):
    """Run Python with a database that is the only one of the settings."""
    environment = {**os.environ, "DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": SETTINGS}
    return subprocess.run([sys.executable, "-m", *arguments], env=environment, capture_output=True, text=True)


def run_all(url, commands=frozenset(CALLS)):
    """Run commands; give what became of each by its name."""
    ended = in_django(url, "tests.outbox.management.all_commands", *sorted(commands))
    assert ended.returncode == 0, ended.stderr
    return {found["command"]: found for found in map(json.loads, ended.stdout.splitlines())} | {"log": ended.stderr}


@pytest.fixture(scope="module")
def on_an_empty_database():
    with Postgres() as server:
        yield run_all(server.url)


@pytest.fixture(scope="module")
def on_a_database_that_is_away():
    return run_all("postgresql://postgres@127.0.0.1:1/away")


@pytest.fixture(scope="module")
def on_a_replica():
    """What a server says that was migrated, and is a standby now."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # the server does not run as root
        with Postgres(Path(folder, "server")) as server:
            migrated = in_django(server.url, "django", "migrate", "--verbosity", "0")
            assert migrated.returncode == 0, migrated.stderr
        Path(folder, "server", "data", "standby.signal").touch()
        with Postgres(Path(folder, "server")) as server:
            yield run_all(server.url, set(CALLS) - MAY_READ_A_REPLICA)


def ended(found, command):
    assert not found[command]["trace"], found[command]["trace"]
    return found[command]["code"], found[command]["said"]


def test_all_commands_are_looked_at():
    assert set(CALLS) == set(names())


@pytest.mark.parametrize("command", sorted(set(CALLS) - NEED_NO_DATABASE))
class TestACommand:
    def test_says_that_the_database_was_not_migrated(self, on_an_empty_database, command):
        code, said = ended(on_an_empty_database, command)

        assert code == 2
        assert any(text in said for text in ("has no tables of the outbox", "table is missing", "tables of the embedded broker"))
        assert "Run manage.py migrate" in said
        assert "LINE 1" not in said

    def test_says_that_the_database_is_away(self, on_a_database_that_is_away, command):
        code, said = ended(on_a_database_that_is_away, command)

        assert code == 2
        assert 'connection to server at "127.0.0.1", port 1 failed' in said

    def test_says_that_the_database_is_a_replica(self, on_a_replica, command):
        if command in MAY_READ_A_REPLICA:
            return

        code, said = ended(on_a_replica, command)

        assert code == 2
        assert "atabase 'default'" in said
        assert "is a replica and accepts no writes" in said


class TestAConsumer:
    def test_logs_a_line_and_no_traceback_while_it_waits_for_the_tables(self, on_an_empty_database):
        assert "Group 'cart' waits: Database 'default' has no tables of the outbox." in on_an_empty_database["log"]
        assert "Traceback" not in on_an_empty_database["log"]
