"""The tables of docs/reference/checks.md, from the docstrings of outbox/checks/ and outbox/pipeline/checks/."""

from __future__ import annotations

import re
from collections.abc import Iterator
from inspect import getdoc
from typing import Any

from django.core.checks import Tags
from django.core.checks.registry import registry

from docs.generate import reasons
from docs.generate.markdown import of_app, table

ENTRY = re.compile(r"^((?:[EW]\d{3}(?:, )?)+): (.+?)\n\n(.+?)(?=\n\n[EW]\d{3}|\Z)", re.DOTALL | re.MULTILINE)

CORE, PIPELINE = "outbox.checks.", "outbox.pipeline.checks."


def page() -> str:
    """Make the page."""
    return "\n\n".join([_table(CORE), "## `outbox.pipeline`", of_app("outbox.pipeline"), _table(PIPELINE)])


def entries(*packages: str) -> Iterator[tuple[str, str, str, str]]:
    """Return id, when, what is found and what to do about it, as the docstrings of registered checks say, by id."""
    functions = [check for check in registry.get_checks(include_deployment_checks=True) if check.__module__.startswith(packages)]
    found = [(entry, _when(function)) for function in functions for entry in ENTRY.findall(getdoc(function) or "")]
    rows = [(number, when, what, how) for (ids, what, how), when in found for number in ids.split(", ")]
    for number, when, what, how in sorted(rows, key=lambda row: row[0][1:]):
        yield number, when, what, how.replace(" (With `--deploy`.)", "")


def _when(check: Any) -> str:
    if check in registry.deployment_checks:
        return "`--deploy`"
    return "`--database`" if Tags.database in check.tags else "always"


def _table(package: str) -> str:
    cells = [[f"`outbox.{number}`", *row, reasons.CHECKS[number]] for number, *row in entries(package)]
    return table(["id", "when", "finds", "what to do", "without it"], cells)
