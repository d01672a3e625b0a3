"""The README's quick start, read out of the README."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# What the quick start presumes: DATABASES names a PostgreSQL.
DATABASES = """
import os
import dj_database_url
DATABASES = {"default": dj_database_url.parse(os.environ["DATABASE_URL"])}
"""


QUICK_START, TEST = "Put it into a project", "Test"


def section(title: str = QUICK_START) -> str:
    """Return a section's text."""
    _, _, rest = (ROOT / "README.md").read_text().partition(f"\n## {title}\n")
    return rest.partition("\n## ")[0]


def blocks(title: str = QUICK_START) -> list[tuple[str, str]]:
    """Return the files that a section has one write: (name, lines)."""
    return re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", section(title), re.DOTALL)


def commands() -> list[str]:
    """Return what is typed into a shell."""
    return [line.removeprefix("$ ") for line in section().splitlines() if line.startswith("$ ")]


def write(project: Path) -> None:
    """Write the files into a project of Django's."""
    for name, body in [("mysite/settings.py", DATABASES), *blocks(), *blocks(TEST)]:
        with (project / name).open("a") as file:
            file.write(f"\n{body}")
