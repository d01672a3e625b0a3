"""docs/reference/checks.md, from the docstrings of outbox/checks/ and outbox/pipeline/checks/."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from inspect import getdoc
from typing import Any

from docs.generate import reasons
from docs.generate.markdown import document, of_app, table
from outbox import checks
from outbox.pipeline import checks as pipeline_checks

INTRODUCTION = """
`manage.py check`, and every command before it begins, says what is wrong with settings, message types, consumers and databases.
E is an error, which stops commands; W a warning. Each comes with a hint. What you know better is silenced as with Django's own:
`SILENCED_SYSTEM_CHECKS = ["outbox.W022"]`.

- `manage.py check --tag outbox` runs these only.
- `manage.py check --database default` also asks the server what settings cannot tell.
- `manage.py check --deploy` also looks for what is good on one's own machine only; with `--database`, it asks the brokers, too.
- `manage.py outbox_doctor` runs them all but those of `--deploy`, and goes on to servers and processes.

Two handlers of one message type in one group, and two message types of one name, are refused earlier: when the second is defined.
"""

ENTRY = re.compile(r"^((?:[EW]\d{3}(?:, )?)+): (.+?)\n\n(.+?)(?=\n\n[EW]\d{3}|\Z)", re.DOTALL | re.MULTILINE)

Kinds = Iterable[tuple[str, Iterable[Any]]]

CORE: Kinds = [
    ("always", (*checks.ALWAYS, *checks.WITH_URLS)),
    ("`--database`", checks.WITH_DATABASES),
    ("`--deploy`", checks.WHEN_DEPLOYED),
]
PIPELINE: Kinds = [("always", pipeline_checks.ALWAYS), ("`--database`", pipeline_checks.WITH_DATABASES)]


def page() -> str:
    """Make the page."""
    pipeline = ["## `outbox.pipeline`", of_app("outbox.pipeline"), _table(PIPELINE)]
    return document("System checks", "outbox/checks/ and outbox/pipeline/checks/", INTRODUCTION.strip(), _table(CORE), *pipeline)


def entries(kinds: Kinds | None = None) -> Iterator[tuple[str, str, str, str]]:
    """Return id, when, what is found and what to do about it, as the docstrings say; of all checks, unless some are given."""
    for when, functions in kinds if kinds is not None else (*CORE, *PIPELINE):
        for function in functions:
            for ids, what, how in ENTRY.findall(getdoc(function) or ""):
                for number in ids.split(", "):
                    yield number, when, what, how.replace(" (With `--deploy`.)", "")


def _table(kinds: Kinds) -> str:
    rows = sorted(entries(kinds), key=lambda row: row[0][1:])
    cells = [[f"`outbox.{number}`", when, what, how, reasons.CHECKS[number]] for number, when, what, how in rows]
    return table(["id", "when", "finds", "what to do", "without it"], cells)
