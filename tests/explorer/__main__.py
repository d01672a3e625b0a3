"""Explore schedules: `make explore`, or `python -m tests.explorer`. tests/README.md describes it."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.explorer import clock

SHM = Path("/dev/shm")  # noqa: S108
ROOM = 1 << 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments, start the database, explore."""
    parser = argparse.ArgumentParser(prog="python -m tests.explorer", description="Explore schedules of the framework.")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long to explore (default: 120)")
    parser.add_argument("--schedules", type=int, help="stop after so many")
    parser.add_argument("--seed", type=int, help="run this one seed and print its trace")
    parser.add_argument("--shrink", action="store_true", help="with --seed, --control: make failing schedules short")
    parser.add_argument(
        "--mutant", help="take a rule out, by its name in the table of --control; with --seed, or with --control only this one"
    )
    parser.add_argument("--control", action="store_true", help="take rules out, one at a time, and look for a seed that fails")
    parser.add_argument("--first", type=int, default=1, help="the first seed (default: 1)")
    parser.add_argument("--broker", action="append", help="only with this broker; may be repeated")
    parser.add_argument("--json", help="write the counts to this file")
    options = parser.parse_args(arguments)
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets would differ between two runs of a seed
        again = [sys.executable, "-m", "tests.explorer", *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, "PYTHONHASHSEED": "0"})  # noqa: S606
    if SHM.is_dir() and shutil.disk_usage(SHM).free > ROOM:  # its files are made anew for each schedule
        tempfile.tempdir = str(SHM)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server stops, and its files are deleted
    clock.install()
    from outbox.testing.postgres import Postgres

    with Postgres() as server:
        os.environ.update(server.environment, DJANGO_SETTINGS_MODULE="tests.explorer.settings")
        from tests.explorer import exploring

        exploring.set_up()
        return exploring.explore(options)


if __name__ == "__main__":
    sys.exit(main())
