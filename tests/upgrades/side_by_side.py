"""Two releases side by side on one database, under load."""

from __future__ import annotations

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

# Relays and consumers of a stage, by release. All that ran in the stage before are killed.
STAGES = ((("old",), ("old",)), (("old",), ("new",)), (("new",), ("old",)), (("old", "new"), ("old", "new")))


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
        assert process.wait(60) == 0, self.processes.logs()

    def play(self, seconds: float) -> None:
        """Migrate from the old release to the new one while the old one works, then play the stages."""
        self.run("old", "django", "migrate", "--verbosity", "0")
        with psycopg.connect(self.url) as connection:
            connection.execute(TABLES)
        publishers = [self.start("old", "tests.upgrades.acts", "go_on", "old")]
        for number, stage in enumerate(STAGES):
            workers = self._start_workers(*stage)
            if number == 0:
                wait_until(lambda: self._count("upgrade_effect"), 30)
                self.run("new", "django", "migrate", "--verbosity", "0")
                publishers.append(self.start("new", "tests.upgrades.acts", "go_on", "new"))
            self._work([*workers, *publishers], seconds / len(STAGES))
            if number < len(STAGES) - 1:
                self._kill(workers)
        self._kill(publishers)

    def settle(self, patience: float) -> None:
        """Wait until the processes of the last stage have nothing left to do, if they come to that; the counts tell."""
        with suppress(AssertionError):
            wait_until(lambda: not any(left_to_do(self.url)), patience)

    def _start_workers(self, relays: Sequence[str], consumers: Sequence[str]) -> list[subprocess.Popen[bytes]]:
        workers = [self.start(release, "django", "outbox_relay", "--broker", "default") for release in relays]
        return workers + [self.start(release, "django", "outbox_consume", "--threads", "2") for release in consumers]

    def _work(self, processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
        """Let processes work for so long, once effects are written."""
        before, began = self._count("upgrade_effect"), time.monotonic()
        wait_until(lambda: self._count("upgrade_effect") > before or self._ended(processes), 30)
        wait_until(lambda: time.monotonic() - began > seconds or self._ended(processes), seconds + 30)
        assert not self._ended(processes), f"{self._ended(processes)} ended\n{self.processes.logs()}"

    def _ended(self, processes: Sequence[subprocess.Popen[bytes]]) -> list[object]:
        return [process.args for process in processes if process.poll() is not None]

    def _kill(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            send(process, signal.SIGKILL)
            process.wait()

    def _count(self, table: str) -> int:
        with psycopg.connect(self.url) as connection:
            [(count,)] = connection.execute(f"SELECT count(*) FROM {table}").fetchall()
        return int(count)

    def _published(self) -> Counter[tuple[str, str]]:
        with psycopg.connect(self.url) as connection:
            rows = connection.execute("SELECT what, topic FROM upgrade_case").fetchall()
        return Counter((group, what) for what, topic in rows for group, topics in GROUPS.items() if topic in topics)

    def _handled(self) -> Counter[tuple[str, str]]:
        with psycopg.connect(self.url) as connection:
            return Counter(connection.execute("SELECT consumer_group, what FROM upgrade_effect").fetchall())

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
        """Return how much was published and handled."""
        return {"messages": self._count("upgrade_case"), "effects": self._count("upgrade_effect")}

    def _out_of_order(self) -> list[str]:
        """Return keys whose messages were handled in another order than that in which they were committed."""
        of_key = (
            "SELECT c.key, c.number FROM upgrade_effect e JOIN upgrade_case c USING (what) WHERE c.key <> '' ORDER BY e.number"
        )
        found: dict[str, list[int]] = {}
        with psycopg.connect(self.url) as connection:
            for key, number in connection.execute(of_key):
                found.setdefault(key, []).append(number)
        return [key for key, numbers in found.items() if numbers != sorted(numbers)]
