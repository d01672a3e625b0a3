"""
A real RabbitMQ of one node on a port of its own, as long as the one who started it lives.

    python -m project.servers.rabbitmq          # prints the URL and stays until Ctrl-C
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from project.servers.program import HOST, Program, free_port
from project.servers.rocketmq_jars import ServerError

PROGRAMS = Path("/usr/lib/rabbitmq/bin")  # not in PATH: those in /usr/sbin are for root and the system's own server
NAMES_SECONDS = 1.5  # without a change, the file is on the disk
GREETING = b"AMQP\x00\x00\x09\x01"

CONFIG = """
listeners.tcp.1 = {host}:{port}
loopback_users = none
log.console = true
log.file = false
disk_free_limit.absolute = 50MB
"""


class RabbitMQ(Program):
    """
    One node; leave the block to stop it.

    Args:
        home: its folder; what it stores is there after a restart.
        config: more lines of rabbitmq.conf.
    """

    command = str(PROGRAMS / "rabbitmq-server")
    package = "rabbitmq-server"
    start_seconds = 60

    def __init__(self, home: Path, *, config: str = "") -> None:
        super().__init__()
        self._home = home
        self._config = config
        self._epmd_port, self._dist_port = free_port(), free_port()
        self._epmd: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Where clients find it: host:port."""
        return f"{HOST}:{self.port}"

    @property
    def url(self) -> str:
        """Where clients find it, as kombu and Celery write it."""
        return f"amqp://guest:guest@{self.address}//"

    def knows_after_crash(self, queue: str) -> bool:
        """
        Return whether a quorum queue is there after a crash.

        A node writes down about half a second after the declaration which log is whose. Killed before that, it finds the
        messages no more, elects no leader, and the queue takes nothing until it is deleted (seen with 3.10).
        """
        [names] = self._home.glob("data/*/quorum/*/names.dets")
        return f"%2F_{queue}".encode() in names.read_bytes() and time.time() - names.stat().st_mtime > NAMES_SECONDS

    def kill(self) -> None:
        """Kill the node, as by a crash; `start` starts it again."""
        process, self._process = self._process, None
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._stop_epmd()

    def freeze(self) -> None:
        """Stop the node's process, so that it answers nobody."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen node go on."""
        self._signal(signal.SIGCONT)

    def control(self, *arguments: str) -> str:
        """Run `rabbitmqctl` on the node and return what it prints."""
        command = [PROGRAMS / "rabbitmqctl", "--quiet", "-n", self._node, *arguments]
        done = subprocess.run(command, env=self._environment(), capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise ServerError(f"rabbitmqctl {' '.join(arguments)} failed: {done.stderr or done.stdout}")
        return done.stdout

    def start(self) -> RabbitMQ:
        """Start the node's port mapper, then the node, and wait until it answers. Raises ServerError."""
        if not self.is_here():
            raise ServerError(f"There is no {self.command} here. Install it: apt-get install {self.package}.")
        epmd = shutil.which("epmd")
        assert epmd is not None, "Erlang has it"
        tie = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
        where = ["-port", str(self._epmd_port), "-address", HOST]
        self._epmd = subprocess.Popen([*tie, epmd, *where], stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            super().start()
        except ServerError:
            self._stop_epmd()
            raise
        return self

    def stop(self) -> None:
        """End the node, in an orderly way if it can, and its port mapper."""
        super().stop()
        self._stop_epmd()

    @property
    def _node(self) -> str:
        return f"outbox{self.port}@localhost"

    def _make_home(self) -> Path:
        self._home.mkdir(parents=True, exist_ok=True)
        cookie = self._home / ".erlang.cookie"
        if not cookie.exists():
            cookie.write_text("outbox")
            cookie.chmod(0o400)
        (self._home / "rabbitmq.conf").write_text(CONFIG.format(host=HOST, port=self.port) + self._config)
        (self._home / "enabled_plugins").write_text("[].")
        return self._home

    def _arguments(self, home: Path) -> Sequence[str | Path]:
        return []

    def _environment(self) -> dict[str, str]:
        home = str(self._home)
        return {
            **os.environ,
            "HOME": home,
            "RABBITMQ_NODENAME": self._node,
            "RABBITMQ_DIST_PORT": str(self._dist_port),
            "RABBITMQ_CONFIG_FILE": f"{home}/rabbitmq.conf",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{home}/enabled_plugins",
            "RABBITMQ_MNESIA_BASE": f"{home}/data",
            "RABBITMQ_LOG_BASE": f"{home}/logs",
            "RABBITMQ_PID_FILE": f"{home}/pid",
            "RABBITMQ_GENERATED_CONFIG_DIR": f"{home}/config",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2 +sbwt none",
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": HOST,
        }

    def _answers(self) -> bool:
        """Return whether the node greets a client; its port may be open before."""
        with suppress(OSError), socket.create_connection((HOST, self.port), timeout=2) as connection:
            connection.sendall(GREETING)
            return connection.recv(1) == b"\x01"
        return False

    def _signal(self, number: int) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, number)

    def _stop_epmd(self) -> None:
        process, self._epmd = self._epmd, None
        if process is not None:
            process.kill()
            process.wait()


def main() -> int:
    """Start a node in a folder of its own, print its URL, and stay until Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="outbox-rabbitmq-") as home:
        try:
            with RabbitMQ(Path(home)) as server:
                print(server.url, flush=True)  # noqa: T201
                server.wait()
                return 1
        except ServerError as error:
            print(error, file=sys.stderr)  # noqa: T201
            return 1
        except KeyboardInterrupt:
            return 0


if __name__ == "__main__":
    sys.exit(main())
