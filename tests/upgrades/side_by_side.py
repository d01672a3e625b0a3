"""Two releases side by side on one database, under load."""

import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
from django.conf import settings

from tests.journeys.processes import Processes, send
from tests.upgrades.consumers import GROUPS
from tests.upgrades.shop import TABLES, left_to_do
from tests.waiting import wait_until

PATIENCE = 60.0  # seconds, until what a stage has published is handled

# Relays and consumers of a stage, by release. All that ran in the stage before are killed.
STAGES = ((("old",), ("new",)), (("new",), ("old",)), (("old", "new"), ("old", "new")))


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=settings.BASE_DIR, check=True, capture_output=True, text=True).stdout.strip()


def release_before() -> str:
    """Return the revision that UPGRADE_FROM names, by default the newest tag of a release; without one, HEAD."""
    return os.environ.get("UPGRADE_FROM") or git("tag", "--list", "v*", "--sort=-version:refname").partition("\n")[0] or "HEAD"


def unpack(revision: str, folder: Path) -> None:
    """Write the package of a revision into a folder."""
    archive = subprocess.run(["git", "archive", revision, "outbox"], cwd=settings.BASE_DIR, check=True, capture_output=True)
    subprocess.run(["tar", "--extract", "--directory", folder], input=archive.stdout, check=True)


class SideBySide:
    """
    Starts processes of both releases, and counts.

    Args:
        old: the folder with the package of the release before.
    """

    def __init__(self, url: str, old: Path, folder: Path) -> None:
        self.url = url
        self.processes = Processes(folder, "tests.upgrades.settings")
        here = str(settings.BASE_DIR)
        self.variables = {
            "old": {"OUTBOX_FOLDER": str(old), "PYTHONPATH": f"{old}{os.pathsep}{here}"},
            "new": {"OUTBOX_FOLDER": here, "PYTHONPATH": here},
        }

    def start(self, release: str, *command: str) -> subprocess.Popen[bytes]:
        # Without the working folder, where the package of this release is, before PYTHONPATH.
        return self.processes.start(*command, DATABASE_URL=self.url, PYTHONSAFEPATH="1", **self.variables[release])

    def run(self, release: str, *command: str) -> None:
        process = self.start(release, *command)
        assert process.wait(PATIENCE) == 0, self.processes.logs()

    def play(self, seconds: float) -> None:
        """Migrate from the old release to the new one while the old one works, then play the stages."""
        self.run("old", "django", "migrate", "--verbosity", "0")
        with psycopg.connect(self.url) as connection:
            connection.execute(TABLES)
        publishers = [self.start("old", "tests.upgrades.acts", "go_on", "old")]
        workers = self._start_workers(("old",), ("old",))
        wait_until(lambda: self._read("SELECT FROM upgrade_effect LIMIT 1"), PATIENCE)
        self.run("new", "django", "migrate", "--verbosity", "0")
        publishers.append(self.start("new", "tests.upgrades.acts", "go_on", "new"))
        self._work([*workers, *publishers], 0)
        for relays, consumers in STAGES:
            self._kill(workers)
            workers = self._start_workers(relays, consumers)
            self._work([*workers, *publishers], seconds / len(STAGES))
        self._kill(publishers)

    def settle(self, patience: float) -> None:
        """Wait until the processes of the last stage have nothing left to do, if they come to that; the counts tell."""
        with suppress(AssertionError):
            wait_until(lambda: not any(left_to_do(self.url)), patience)

    def _start_workers(self, relays: Sequence[str], consumers: Sequence[str]) -> list[subprocess.Popen[bytes]]:
        workers = [self.start(release, "django", "outbox_relay", "--broker", "default") for release in relays]
        return workers + [self.start(release, "django", "outbox_consume", "--threads", "2") for release in consumers]

    def _work(self, processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
        """Let processes work for so long, until a message is handled that was published meanwhile, and that a relay sends."""
        [(last,)] = self._read("SELECT coalesce(max(number), 0) FROM upgrade_case")
        handled = (
            f"SELECT FROM upgrade_effect JOIN upgrade_case c USING (what) WHERE c.number > {last} AND c.topic = 'notes' LIMIT 1"
        )
        began = time.monotonic()
        try:
            wait_until(lambda: self._read(handled) or self._ended(processes), PATIENCE)
            wait_until(lambda: time.monotonic() - began > seconds or self._ended(processes), seconds + PATIENCE)
            assert not self._ended(processes), f"{self._ended(processes)} ended"
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.processes.logs()}") from error

    def _ended(self, processes: Sequence[subprocess.Popen[bytes]]) -> list[object]:
        return [process.args for process in processes if process.poll() is not None]

    def _kill(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            send(process, signal.SIGKILL)
            process.wait()

    def _read(self, query: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url) as connection:
            return connection.execute(query).fetchall()

    def _published(self) -> Counter[tuple[str, str]]:
        rows = self._read("SELECT what, topic FROM upgrade_case")
        return Counter((group, what) for what, topic in rows for group, topics in GROUPS.items() if topic in topics)

    def _handled(self) -> Counter[tuple[str, str]]:
        return Counter((group, what) for group, what in self._read("SELECT consumer_group, what FROM upgrade_effect"))

    def counts(self) -> dict[str, Any]:
        """Return what was committed and not handled, handled and not committed, handled twice, and out of its key's order."""
        published, handled = self._published(), self._handled()
        return {
            "lost": sorted(set(published) - set(handled)),
            "ghosts": sorted(set(handled) - set(published)),
            "twice": sorted(one for one, times in handled.items() if times > 1),
            "out of order": self._out_of_order(),
        }

    def report(self) -> dict[str, int]:
        """Return how many messages were committed, and handled, once for each group."""
        return {"messages": sum(self._published().values()), "handled": sum(self._handled().values())}

    def _out_of_order(self) -> list[str]:
        """Return keys whose messages were handled in another order than that in which they were committed."""
        of_key = (
            "SELECT c.key, c.number FROM upgrade_effect e JOIN upgrade_case c USING (what) WHERE c.key <> '' ORDER BY e.number"
        )
        found: dict[str, list[int]] = {}
        for key, number in self._read(of_key):
            found.setdefault(key, []).append(number)
        return [key for key, numbers in found.items() if numbers != sorted(numbers)]
