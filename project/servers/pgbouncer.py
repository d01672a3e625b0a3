"""
A real PgBouncer, by default in transaction mode, on a port of its own, as long as the one who started it lives.

    python -m project.servers.pgbouncer         # before the server of DATABASE_URL; prints the URL that leads through it
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

from psycopg.conninfo import conninfo_to_dict

from outbox.testing.programs import owner_of_server
from project.servers.redis import free_port
from project.servers.rocketmq_jars import ServerError

HOST = "127.0.0.1"
START_SECONDS = 10
STOP_SECONDS = 15

# Whoever reaches the port is the user of the URL, as whoever reaches the socket of a throw-away PostgreSQL is.
CONFIG = """
[databases]
* = {target}

[pgbouncer]
listen_addr = {host}
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
default_pool_size = {pool_size}
max_client_conn = 500
"""


def has_pgbouncer() -> bool:
    """Return whether there is a pooler to start."""
    return shutil.which("pgbouncer") is not None


class PgBouncer:
    """
    One pooler before one server, for all of its databases; leave the block to stop it.

    Args:
        server: the URL of one of the server's databases; its host, or its socket's folder, may be a part of the query.
        pool_size: as many backends share the connections of a database.
        mode: how long a connection keeps its backend: "transaction" or "session".
    """

    def __init__(self, server: str, *, pool_size: int = 4, mode: str = "transaction") -> None:
        self.pool_size = pool_size
        self.mode = mode
        self.port = free_port()
        self._server = conninfo_to_dict(server)
        self._process: subprocess.Popen[bytes] | None = None
        self._home: Path | None = None

    def url_of(self, database: str) -> str:
        """Return the URL of a database, through the pooler."""
        return f"postgresql://{quote(str(self._server['user']), safe='')}@{HOST}:{self.port}/{quote(database, safe='')}"

    @property
    def url(self) -> str:
        """The URL of the database that was named, through the pooler."""
        return self.url_of(str(self._server["dbname"]))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start(self) -> Self:
        """Start it and wait until it answers. Raises ServerError."""
        if not has_pgbouncer():
            raise ServerError("There is no pgbouncer here. Install it: apt-get install pgbouncer.")
        self._home = Path(tempfile.mkdtemp(prefix="outbox-pgbouncer-"))
        owner = owner_of_server()  # it refuses to run as root, as PostgreSQL does
        config, log = self._home / "pgbouncer.ini", self._home / "log"
        config.write_text(self._config())
        tie = ["setpriv", "--pdeathsig", "INT"] if shutil.which("setpriv") else []  # a killed parent leaves none behind
        if owner:
            for path in (self._home, config):
                os.chown(path, owner.pw_uid, owner.pw_gid)
            tie = [*(tie or ["setpriv"]), f"--reuid={owner.pw_uid}", f"--regid={owner.pw_gid}", "--clear-groups"]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*tie, "pgbouncer", config], stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = log.read_text()
                self.stop()
                raise ServerError(f"PgBouncer did not start. It said:\n{said}")
            time.sleep(0.02)
        return self

    def wait(self) -> None:
        """Wait until it ends without being stopped here."""
        if self._process is not None:
            self._process.wait()

    def stop(self) -> None:
        """End all connections and the pooler, and delete its folder."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        home, self._home = self._home, None
        if home is not None:
            shutil.rmtree(home, ignore_errors=True)

    def _config(self) -> str:
        names = ("host", "port", "user", "password")
        target = [f"{name}='{_quoted(self._server[name])}'" for name in names if self._server.get(name)]
        return CONFIG.format(target=" ".join(target), host=HOST, port=self.port, mode=self.mode, pool_size=self.pool_size)

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection((HOST, self.port), timeout=1):
            return True
        return False


def _quoted(value: object) -> str:
    return str(value).replace("'", "''")


def main() -> int:
    """Start a pooler before the server of DATABASE_URL, print the URL through it, and stay until Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m project.servers.pgbouncer", description=main.__doc__)
    parser.add_argument("--pool-size", type=int, default=4, metavar="N", help="backends of each database (default: 4)")
    options = parser.parse_args()
    if "DATABASE_URL" not in os.environ:
        parser.error("DATABASE_URL names no server")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with PgBouncer(os.environ["DATABASE_URL"], pool_size=options.pool_size) as pooler:
            print(pooler.url, flush=True)  # noqa: T201
            pooler.wait()
            return 1
    except ServerError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
