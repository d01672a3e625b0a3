"""Take rules out of a copy of the checkout, one at a time: the tests that belong to a rule have to fail. `make mutants`."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from outbox.management.tables import table
from outbox.testing.postgres import Postgres
from tests.mutants.table import MUTANTS

ROOT = Path(__file__).parents[2]
COPIED = ("outbox", "project", "tests", "docs", "manage.py", "pyproject.toml", "README.md", "outbox_schema.json")
SERVERS = Path("var/kafka")  # its jars
TIMEOUT_SECONDS = 300
PYTEST = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", "--timeout", "120")
FAILED = re.compile(r"^FAILED (\S+)", re.MULTILINE)
# A statement that is none, or a test that ended at its time limit.
PROVES_NOTHING = re.compile(r"^E .*(psycopg\.errors\.(SyntaxError|Undefined\w+)|from pytest-timeout)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Verdict:
    """
    What became of a mutant.

    Args:
        killed_by: the first test that failed; "" where none did.
        trouble: why the run proves nothing; "" where it proves something.
    """

    name: str
    rule: str
    killed_by: str
    trouble: str
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen mutants, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description="Take rules out of a copy of the checkout, one at a time, and run the tests that belong to each.",
        epilog="Exit code: 0 each was found, 1 a test is missing: a rule can be left out, 2 a mutant is no program, or its tests fail.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="(default: all)")
    parser.add_argument("--some", type=int, metavar="N", help="so many from all over the table, others each minute")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the verdicts there, too")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - MUTANTS.keys():
        parser.error(f"there is no mutant {', '.join(sorted(unknown))}. Choices are: {', '.join(MUTANTS)}.")
    chosen = options.names or (choose(list(MUTANTS), options.some, int(time.time() / 60)) if options.some else list(MUTANTS))
    print(f"Taking out, one at a time: {', '.join(chosen)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="outbox-mutants-") as folder, Postgres() as server:
        copy = _copy(Path(folder))
        environment = {**os.environ, **server.environment, "PYTHONDONTWRITEBYTECODE": "1"}
        verdicts = [_run(copy, name, environment) for name in chosen]
    rows = [[one.name, one.seconds, one.killed_by or one.trouble or "NOTHING", one.rule] for one in verdicts]
    print(table(["mutant", "seconds", "killed by", "rule"], rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in verdicts], indent=2))
    return 2 if any(one.trouble for one in verdicts) else int(not all(one.killed_by for one in verdicts))


def choose(names: Sequence[str], count: int, turn: int) -> list[str]:
    """Return some names at equal distances; after some turns each was returned."""
    step = max(1, len(names) // count)
    return [names[(turn + number * step) % len(names)] for number in range(min(count, len(names)))]


def _copy(folder: Path) -> Path:
    """Copy what the tests need; the virtual environment and the jars of servers are those of the checkout."""
    for name in COPIED:
        if (source := ROOT / name).is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("*.pyc.*"))  # that tests are writing
        else:
            shutil.copy(source, folder / name)
    if (ROOT / SERVERS).exists():
        (folder / SERVERS).parent.mkdir(parents=True)
        (folder / SERVERS).symlink_to(ROOT / SERVERS)
    return folder


def _run(copy: Path, name: str, environment: dict[str, str]) -> Verdict:
    mutant = MUTANTS[name]
    path, began = copy / mutant.file, time.monotonic()
    whole = path.read_text()
    path.write_text(whole.replace(mutant.old, mutant.new))
    killed_by = trouble = ""
    try:
        done = subprocess.run(
            [*PYTEST, *mutant.tests], cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
        )
        if done.returncode == 1 and (failed := FAILED.search(done.stdout)) and not PROVES_NOTHING.search(done.stdout):
            killed_by = failed[1]
        elif done.returncode:
            trouble = f"exit code {done.returncode}: {done.stdout.strip()[-500:]}"
    except subprocess.TimeoutExpired:
        trouble = f"no end within {TIMEOUT_SECONDS} s"
    finally:
        path.write_text(whole)
    print(f"{name}: {killed_by or trouble or 'NOTHING'}", file=sys.stderr, flush=True)
    return Verdict(name, mutant.rule, killed_by, trouble, round(time.monotonic() - began, 1))


if __name__ == "__main__":
    sys.exit(main())
