"""Processes of a journey: each in a session of its own, on the test's database."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from django.conf import settings as django_settings

from tests.database_url import environment_of


class Processes:
    """
    Starts processes, and ends all of them in the end.

    Args:
        folder: for logs and Celery's files.
        settings: the module of their settings.
    """

    def __init__(self, folder: Path, settings: str) -> None:
        self.folder = folder
        self.settings = settings
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start `python -m ...` with more variables in its environment."""
        environment = environment_of(self.settings, **{"CELERY_FILES_DIR": str(self.folder / "celery"), **variables})
        with (self.folder / f"{command[-1]}.{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=django_settings.BASE_DIR,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def logs(self) -> str:
        """Return the end of each process's output, for a test that failed."""
        return "\n".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in sorted(self.folder.glob("*.log")))

    def close(self) -> None:
        for process in self.processes:
            send(process, signal.SIGKILL)
            process.wait()


def send(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a process and its children, if it is still there."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
