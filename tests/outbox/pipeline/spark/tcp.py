"""A TCP port that leads to a server which has only a socket file, as the tests' own PostgreSQL does: Java opens no such file."""

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from psycopg.conninfo import conninfo_to_dict


@contextmanager
def reached_by_tcp(url: str) -> Iterator[str]:
    """Return a URL of the same database that names a host and a port."""
    parts = conninfo_to_dict(url)
    host = str(parts.get("host", ""))
    if not host.startswith("/"):
        yield url
        return
    path = f"{host}/.s.PGSQL.{parts.get('port', 5432)}"

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.socket(socket.AF_UNIX) as there:
                there.connect(path)
                back = threading.Thread(target=_pump, args=(there, self.request), daemon=True)
                back.start()
                _pump(self.request, there)
                back.join()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"postgresql://{parts['user']}@127.0.0.1:{server.server_address[1]}/{parts['dbname']}"
        server.shutdown()


def _pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # one of the two has hung up
