"""Write the pages. Django is set up with the shop's settings; no database is asked."""

from __future__ import annotations

import os
from pathlib import Path

import django

FOLDER = Path(__file__).resolve().parents[1] / "reference"


def write() -> None:
    """Write every page."""
    from docs.generate.pages import PAGES

    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())


if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")
    django.setup()
    write()
