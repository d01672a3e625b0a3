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


def section() -> str:
    """Give the section's text."""
    text = (ROOT / "README.md").read_text()
    return text[text.index("## Put it into a project") : text.index("## Run it")]


def blocks() -> list[tuple[str, str]]:
    """Give the files to write: (name, lines)."""
    return re.findall(r"```python\n# (\S+)\n(.*?)```", section(), re.DOTALL)


def commands() -> list[str]:
    """Give what is typed into a shell."""
    return [line.removeprefix("$ ") for line in section().splitlines() if line.startswith("$ ")]


def write(project: Path) -> None:
    """Write the files into a project of Django's."""
    for name, body in [("mysite/settings.py", DATABASES), *blocks()]:
        with (project / name).open("a") as file:
            file.write(f"\n{body}")
