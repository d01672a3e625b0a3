"""Tables of text."""

from __future__ import annotations

from collections.abc import Sequence

from outbox.logs import one_line


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return rows in columns under their headings, with numbers aligned to the right."""
    cells = [[_text(value) for value in row] for row in rows]
    widths = [max(len(head), *(len(row[n]) for row in cells)) if cells else len(head) for n, head in enumerate(heads)]
    is_number = [bool(rows) and all(isinstance(row[n], int | float | None) for row in rows) for n in range(len(heads))]
    lines = [_line(list(heads), widths, is_number), *(_line(row, widths, is_number) for row in cells)]
    return "\n".join(lines)


def _text(value: object) -> str:
    return "" if value is None else one_line(str(value))  # received text must not move the cursor or begin a new line


def _line(cells: list[str], widths: list[int], is_number: list[bool]) -> str:
    padded = [
        cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(cells, widths, is_number, strict=True)
    ]
    return "  ".join(padded).rstrip()
