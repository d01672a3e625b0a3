"""What a page quotes from a file that runs."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def python_blocks(page: str) -> list[str]:
    """Return the Python blocks of a page of docs/."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


def is_quoted(block: str, *files: str) -> bool:
    """Return whether each paragraph of a block stands in one of these files, line by line."""
    sources = [_lines((ROOT / file).read_text()) for file in files]
    return all(any(_lines(part) in source for source in sources) for part in re.split(r"\n\n\n|\n# …\n", block.strip("\n")))


def _lines(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines())
