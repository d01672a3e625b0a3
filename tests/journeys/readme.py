"""The README's example, read out of the README."""

import re
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# What the README presumes: DATABASES names a PostgreSQL.
DATABASES = """
import os
import dj_database_url
DATABASES = {"default": dj_database_url.parse(os.environ["DATABASE_URL"])}
"""

INSTALL, EXAMPLE, TASK = "Install", "Example: points for each order", "A Celery task in the transaction"
RUN, TEST, WHY = "Run", "Test", "Why"

FILE = re.compile(r"^# (?P<name>[\w/]+\.py)(?:, (?P<only>[\w ]+))?\n", re.MULTILINE)


def text() -> str:
    """Return the whole README."""
    return (ROOT / "README.md").read_text()


def section(title: str) -> str:
    """Return a section's text."""
    _, found, rest = text().partition(f"\n## {title}\n")
    assert found, title
    return rest.partition("\n## ")[0]


def introduction() -> str:
    """Return the code above the first section."""
    [block] = _python(text().partition("\n## ")[0])
    return block


def files(title: str) -> list[tuple[str, str, str]]:
    """Return the files that a section has one write: (name, what the block is for if not for all, lines)."""
    found = []
    for block in _python(section(title)):
        _, *parts = FILE.split(block)
        assert parts, block
        found += [(name, parts[1] or "", lines) for name, lines in zip(parts[::3], parts[2::3], strict=True)]
    return found


def commands(title: str) -> list[str]:
    """Return what a section has one type into a shell."""
    return [line.removeprefix("$ ") for line in section(title).splitlines() if line.startswith("$ ")]


def write(project: Path, *, also: Collection[str] = ()) -> None:
    """
    Write the files into a project of Django's.

    Args:
        also: which lines that are not for all readers: "with RabbitMQ", "with tasks", "on Celery".
    """
    found = [one for title in (INSTALL, EXAMPLE, TASK, RUN, TEST) for one in files(title)]
    assert {only for _, only, _ in found} >= set(also)
    chosen = [(name, lines) for name, only, lines in found if not only or only in also]
    for name, lines in [("mysite/settings.py", DATABASES), *chosen]:
        with (project / name).open("a") as file:
            file.write(f"\n{lines}")


def _python(part: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", part, re.DOTALL)
