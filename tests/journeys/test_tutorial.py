"""The tutorial, followed line by line in a fresh project."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = (ROOT / "docs/tutorial.md").read_text()

PORT = "8000"  # of the page; the test takes a free one


def steps() -> Iterator[tuple[str, str]]:
    """Return the page's blocks in order: (file to append to, lines) or ("$", commands with their output)."""
    for language, body in re.findall(r"```(python|console)\n(.*?)```", TUTORIAL, re.DOTALL):
        if language == "console":
            yield "$", body
        else:
            first, _, lines = body.partition("\n")
            yield first.removeprefix("# "), lines


def commands(block: str) -> Iterator[tuple[str, str]]:
    """Return each command of a console block with the output that is shown under it."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


class Reader:
    """Does what the page says, in a folder."""

    def __init__(self, folder: Path, database_url: str) -> None:
        self._folder = folder
        self._environment = {**os.environ, "DATABASE_URL": database_url, "PYTHONPATH": str(ROOT)}
        self._environment.pop("DJANGO_SETTINGS_MODULE", None)
        self._server: subprocess.Popen[bytes] | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = str(free.getsockname()[1])

    def append(self, name: str, lines: str) -> None:
        with (self._folder / name).open("a") as file:
            file.write("\n" + lines)

    def run(self, command: str) -> tuple[int, str]:
        command = self._here(command)
        if "runserver" in command:
            self._serve(command)
            return 0, ""
        done = subprocess.run(["bash", "-c", command], cwd=self._folder, env=self._environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    def close(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.wait(10)

    def _here(self, command: str) -> str:
        command = command.replace(f":{PORT}/", f":{self._port}/")
        command = re.sub(r"\bpython\b", shlex.quote(sys.executable), command)
        return re.sub(r"^django-admin\b", f"{shlex.quote(sys.executable)} -m django", command)

    def _serve(self, command: str) -> None:
        command = f"exec {command} --noreload {self._port}"
        self._server = subprocess.Popen(
            ["bash", "-c", command], cwd=self._folder, env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until(self._answers, 30)

    def _answers(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", int(self._port))) == 0


@pytest.fixture
def reader(tmp_path: Path, fresh_database: str) -> Iterator[Reader]:
    reader = Reader(tmp_path, fresh_database)
    yield reader
    reader.close()


# What the page tells in words about output that it does not show.
TOLD = {
    "python manage.py outbox_status": (1, r"orders +default +transaction +once +1\b[\s\S]*No relay is running"),
    "python manage.py outbox_replay": (0, r"There are no points for nothing\."),
}


class TestTutorial:
    @pytest.mark.timeout(240)
    def test_says_what_happens(self, reader: Reader):
        for name, body in steps():
            if name != "$":
                reader.append(name, body)
                continue
            for command, shown in commands(body):
                if command.startswith("pip install"):
                    continue  # test_wheel.py installs the package; here it is on the path

                code, output = reader.run(command)

                expected, pattern = TOLD.get(command, (0, re.escape(shown.strip()) + r"\s*\Z"))
                if shown == "Killed\n":  # which the shell says only to a terminal
                    expected, pattern = -signal.SIGKILL, ""
                assert code == expected, f"$ {command}\n{output}"
                assert re.search(pattern, output), f"$ {command}\n{output}"
