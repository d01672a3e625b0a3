"""Which pages there are."""

from __future__ import annotations

from collections.abc import Callable

from docs.generate import api, checks, commands, errors, settings, tables

PAGES: dict[str, Callable[[], str]] = {
    "api.md": api.page,
    "checks.md": checks.page,
    "commands.md": commands.page,
    "errors.md": errors.page,
    "settings.md": settings.page,
    "states-and-tables.md": tables.page,
}
