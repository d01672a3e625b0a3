"""docs/reference/checks.md, from the docstrings of outbox/checks/."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from inspect import getdoc
from typing import Any

from docs.generate.markdown import document, table
from outbox import checks

INTRODUCTION = """
`manage.py check`, and every command before it begins, says what is wrong with settings, message types, consumers and databases.
E is an error, which stops commands; W a warning. Each comes with a hint. What you know better is silenced as with Django's own:
`SILENCED_SYSTEM_CHECKS = ["outbox.W022"]`.

- `manage.py check --tag outbox` runs these only.
- `manage.py check --database default` also asks the server what settings cannot tell.
- `manage.py check --deploy` also looks for what is good on one's own machine only.
- `manage.py outbox_doctor` runs them all but those of `--deploy`, and goes on to servers and processes.

Two handlers of one message type in one group, and two message types of one name, are refused earlier: when the second is defined.
"""

ENTRY = re.compile(r"^((?:[EW]\d{3}(?:, )?)+): (.+?)\n\n(.+?)(?=\n\n[EW]\d{3}|\Z)", re.DOTALL | re.MULTILINE)


def page() -> str:
    """Make the page."""
    rows = sorted(entries(), key=lambda row: row[0][1:])
    cells = [[f"`outbox.{number}`", when, what, how] for number, when, what, how in rows]
    return document("System checks", "outbox/checks/", INTRODUCTION.strip(), table(["id", "when", "finds", "what to do"], cells))


def entries() -> Iterator[tuple[str, str, str, str]]:
    """Give id, when, what is found and what to do about it, as the docstrings say."""
    kinds: list[tuple[str, Iterable[Any]]] = [
        ("always", (*checks.ALWAYS, *checks.WITH_URLS)),
        ("`--database`", checks.WITH_DATABASES),
        ("`--deploy`", checks.WHEN_DEPLOYED),
    ]
    for when, functions in kinds:
        for function in functions:
            for ids, what, how in ENTRY.findall(getdoc(function) or ""):
                for number in ids.split(", "):
                    yield number, when, what, how.replace(" (With `--deploy`.)", "")
