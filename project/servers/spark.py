"""
A real Spark cluster in standalone mode, from the installed PySpark. It ends with the process that started it.

    python -m project.servers.spark                 # prints the master's address, for --master
    python -m project.servers.spark --workers 3     # each has one core
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self
from urllib.request import urlopen

from project.servers.program import HOST, Program, ProgramCluster, free_port

PYSPARK = find_spec("pyspark")
HOME = Path(PYSPARK.origin).parent if PYSPARK and PYSPARK.origin else Path()
DEPLOY = "org.apache.spark.deploy"
INHERITED = ("HOME", "JAVA_HOME", "LANG", "PATH")  # neither PYTHONPATH nor the variables of Django's settings
# Also for executors: JVMs that compile less start in half the time.
JAVA_FLAGS = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"


class _Node(Program):
    """A master or a worker. `home` is its working directory."""

    command = str(HOME / "bin" / "spark-class")
    package = "default-jre-headless, and pip install pyspark"
    start_seconds = 120

    def __init__(self, home: Path) -> None:
        super().__init__()
        self.page = free_port()
        self._home = home

    @classmethod
    def is_here(cls) -> bool:
        """Return whether PySpark and Java are installed."""
        return PYSPARK is not None and shutil.which("java") is not None

    def state(self) -> dict[str, Any]:
        """
        Return the node's state, from the JSON of its web page.

        Raises:
            OSError, ValueError: the node is starting, or does not answer.
        """
        with urlopen(f"http://{HOST}:{self.page}/json/", timeout=5) as answer:
            state: dict[str, Any] = json.load(answer)
        return state

    def _make_home(self) -> Path:
        self._home.mkdir(exist_ok=True, parents=True)
        return self._home

    def _environment(self, home: Path) -> Mapping[str, str]:
        return {
            **{name: os.environ[name] for name in INHERITED if name in os.environ},
            "SPARK_HOME": str(HOME),
            "SPARK_CONF_DIR": str(home),
            "SPARK_LOCAL_DIRS": str(home),
            "SPARK_LOCAL_IP": HOST,
            "SPARK_DAEMON_MEMORY": "256m",
            "JDK_JAVA_OPTIONS": JAVA_FLAGS,
        }

    def _ports(self) -> list[str]:
        return ["--host", HOST, "--port", str(self.port), "--webui-port", str(self.page)]


class Master(_Node):
    """The master, which gives applications their executors, as a context manager."""

    @property
    def url(self) -> str:
        """The address for --master."""
        return f"spark://{HOST}:{self.port}"

    def _arguments(self, home: Path) -> Sequence[str | Path]:
        return [f"{DEPLOY}.master.Master", *self._ports()]

    def _answers(self) -> bool:
        with suppress(OSError, ValueError):
            return bool(self.state()["status"] == "ALIVE")
        return False


class Worker(_Node):
    """
    A worker with one core, as a context manager. Its executors run in its folder, and end with it.

    Args:
        memory: the memory of all of its executors together.
    """

    def __init__(self, home: Path, master: Master, *, memory: str = "1g") -> None:
        super().__init__(home)
        self._master = master
        self._memory = memory

    @property
    def executors(self) -> int:
        """The number of its running executors."""
        return len(self.state()["executors"])

    def _arguments(self, home: Path) -> Sequence[str | Path]:
        resources = ["--cores", "1", "--memory", self._memory, "--work-dir", str(home / "work")]
        return [f"{DEPLOY}.worker.Worker", *self._ports(), *resources, self._master.url]

    def _answers(self) -> bool:
        with suppress(OSError, ValueError):
            known = self._master.state()["workers"]
            return any(worker["port"] == self.port and worker["state"] == "ALIVE" for worker in known)
        return False


class Cluster(ProgramCluster[Worker]):
    """
    A master and its workers, all on this machine, as a context manager.

    Args:
        home: the parent folder of the nodes' folders.
        workers: number of workers.
    """

    def __init__(self, home: Path, workers: int = 2) -> None:
        self.master = Master(home / "master")
        self.nodes = [Worker(home / f"worker-{number}", self.master) for number in range(1, workers + 1)]

    @property
    def url(self) -> str:
        """The address for --master."""
        return self.master.url

    def start(self) -> Self:
        """
        Start the master, then the workers.

        Raises:
            ServerError: one did not start.
        """
        self.master.start()  # first, since a worker that finds no master tries again only after 10 s
        return super().start()

    def stop(self) -> None:
        """Kill all nodes."""
        super().stop()
        self.master.kill()


def main() -> None:
    """Run a cluster until it is interrupted, in a temporary folder."""
    parser = argparse.ArgumentParser(description="Run a Spark cluster until Ctrl-C; print the address for --master.")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="number of workers, each with one core (default: 2)")
    workers = parser.parse_args().workers
    with tempfile.TemporaryDirectory(prefix="spark-", ignore_cleanup_errors=True) as folder:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        with Cluster(Path(folder), workers) as cluster, suppress(KeyboardInterrupt):
            print(cluster.url, flush=True)  # noqa: T201
            cluster.master.wait()


if __name__ == "__main__":
    main()
