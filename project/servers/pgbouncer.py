"""
A real PgBouncer, by default in transaction mode, on a free port. It ends with the process that started it.

    python -m project.servers.pgbouncer         # a pooler for the server of DATABASE_URL; prints the URL through the pooler
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from psycopg.conninfo import conninfo_to_dict

from outbox.testing.programs import owner_of_server
from project.servers.program import HOST, Program, ServerError

# Every client of the port gets the rights of the URL's user, like every client of a throw-away PostgreSQL's socket.
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


class PgBouncer(Program):
    """
    A pooler for all databases of one server, as a context manager.

    Args:
        server: the URL of one of the server's databases; its host, or its socket's folder, may be in the query.
        pool_size: the number of backends that serve the connections of a database.
        mode: how long a connection keeps its backend: "transaction" or "session".
    """

    command = package = "pgbouncer"
    last_signal = "INT"

    def __init__(self, server: str, *, pool_size: int = 4, mode: str = "transaction") -> None:
        super().__init__()
        self.pool_size = pool_size
        self.mode = mode
        self._server = conninfo_to_dict(server)
        self._home: Path | None = None

    def url_of(self, database: str) -> str:
        """Return the URL of a database, through the pooler."""
        return f"postgresql://{quote(str(self._server['user']), safe='')}@{HOST}:{self.port}/{quote(database, safe='')}"

    @property
    def url(self) -> str:
        """The URL of the database of the `server` argument, through the pooler."""
        return self.url_of(str(self._server["dbname"]))

    def stop(self) -> None:
        """End all connections and the pooler, and delete its folder."""
        super().stop()
        home, self._home = self._home, None
        if home is not None:
            shutil.rmtree(home, ignore_errors=True)

    def _make_home(self) -> Path:
        self._home = Path(tempfile.mkdtemp(prefix="outbox-pgbouncer-"))
        return self._home

    def _arguments(self, home: Path) -> Sequence[str | Path]:
        config = home / "pgbouncer.ini"
        config.write_text(self._config())
        if owner := owner_of_server():
            for path in (home, config):
                os.chown(path, owner.pw_uid, owner.pw_gid)
        return [config]

    def _as_owner(self, prefix: list[str]) -> list[str]:
        owner = owner_of_server()  # PgBouncer refuses to run as root, like PostgreSQL
        if owner is None:
            return prefix
        return [*(prefix or ["setpriv"]), f"--reuid={owner.pw_uid}", f"--regid={owner.pw_gid}", "--clear-groups"]

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
    """Start a pooler for the server of DATABASE_URL, print the URL through it, and run until Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m project.servers.pgbouncer", description=main.__doc__)
    parser.add_argument("--pool-size", type=int, default=4, metavar="N", help="backends of each database (default: 4)")
    options = parser.parse_args()
    if "DATABASE_URL" not in os.environ:
        parser.error("DATABASE_URL is not set")
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
