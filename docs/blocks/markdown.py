"""The little Markdown that the pages need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def of_app(app: str) -> str:
    """Return the sentence on where an app's section of a page applies."""
    return f'Requires `INSTALLED_APPS += ["{app}"]`.'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Make a table; what a cell says is put in one line."""
    lines = [_line(heads), "|" + "---|" * len(heads), *(_line(row) for row in rows)]
    return "\n".join(lines)


def definitions(entries: Iterable[Sequence[str]]) -> str:
    """Make a list of terms, each with its paragraphs: what would be too wide as a table."""
    return "\n\n".join("\n".join([flat(term), *(f": {flat(text)}" for text in texts)]) for term, *texts in entries)


def code(text: str) -> str:
    """Show a text as code; nothing stays nothing."""
    return f"`{text}`" if text else ""


def flat(text: str | None) -> str:
    """Put a docstring in one line."""
    return " ".join((text or "").split())


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(flat(cell).replace("|", "\\|") for cell in cells) + " |"
