"""docs/reference/checks.md, from the docstrings of system checks and of rules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from inspect import getdoc
from typing import Any

from django.core.checks import Tags
from django.core.checks.registry import registry

from docs.blocks import reasons
from docs.blocks.markdown import definitions, of_app
from outbox.findings import ERRORS, Needs, Rule, rules
from outbox.monitoring import doctor  # noqa: F401 (registers rules)

RUNNING = """
`outbox_status`, the admin's overview, `health/outbox/`, `/metrics/` and the doctor say what is wrong with the running system. A
finding stays until its cause is gone. The page [Monitor](../how-to/watch.md) says how to use them.
"""

DOCTOR = """
`outbox_doctor` asks servers, too. `manage.py check --deploy --database` asks the brokers among them.
"""

IDS = r"((?:(?:[EW]\d{3}|database_unfit)(?:, )?)+)"
ENTRY = re.compile(rf"^{IDS}: (.+?)\n\n(.+?)(?=\n\n{IDS}: |\Z)", re.DOTALL | re.MULTILINE)
ENTRY_OF_RULE = re.compile(r"^([\w.]+): (.+?)\n {4}(.+?)(?=\n\S|\Z)", re.DOTALL | re.MULTILINE)

CORE, PIPELINE = "outbox.checks.", "outbox.pipeline.checks"


def page() -> str:
    """Make the page."""
    parts = [
        _list(CORE),
        *("## `outbox.pipeline`", of_app("outbox.pipeline"), _list(PIPELINE)),
        *("## What needs attention", RUNNING.strip(), _list_of(Needs.STATUS, Needs.DATABASE)),
        *("## What only the doctor asks", DOCTOR.strip(), _list_of(Needs.SERVERS)),
    ]
    return "\n\n".join(parts)


def entries(*packages: str) -> Iterator[tuple[str, str, str, str]]:
    """Return id, when, what is found and what to do about it, as the docstrings of registered checks say, by id."""
    functions = [check for check in registry.get_checks(include_deployment_checks=True) if check.__module__.startswith(packages)]
    found = [(entry, _when(function)) for function in functions for entry in ENTRY.findall(getdoc(function) or "")]
    rows = [(number, when, what, how) for (ids, what, how, _), when in found for number in ids.split(", ")]
    for number, when, what, how in sorted(rows, key=lambda row: row[0][1:]):
        yield number, when, what, how.replace(" (With `--deploy`.)", "")


def entries_of(*needs: Needs) -> Iterator[tuple[str, str, str]]:
    """Return id, what is found and what to do about it, as the docstrings of rules say, in the order in which they are asked."""
    functions = [one.find for one in rules(*needs)] + ([Rule.failed] if Needs.STATUS in needs else [])
    for function in functions:
        for name, what, how in ENTRY_OF_RULE.findall(getdoc(function) or ""):
            yield name if "." in name else f"outbox.{name}", what, how


def _when(check: Any) -> str:
    if check in registry.deployment_checks:
        return "`--deploy`"
    return "`--database`" if Tags.database in check.tags else "always"


def _list(package: str) -> str:
    return definitions(
        [f"{_anchor(f'outbox.{number}')}: {when}", what, how, f"*Without it:* {reasons.CHECKS[number]}"]
        for number, when, what, how in entries(package)
    )


def _list_of(*needs: Needs) -> str:
    return definitions(
        [f"{_anchor(name)}: {'error' if name in ERRORS else 'warning'}", what, how] for name, what, how in entries_of(*needs)
    )


def _anchor(name: str) -> str:
    """Return an id that links can point to: checks.md#outbox.no_relay."""
    return f'<a id="{name}"></a>`{name}`'
