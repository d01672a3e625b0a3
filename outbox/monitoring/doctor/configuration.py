"""The system checks of the outbox, as `manage.py check --tag outbox --database ...` runs them."""

from __future__ import annotations

from collections.abc import Iterator

from django.core import checks

from outbox import database
from outbox.checks import TAG
from outbox.monitoring.doctor.finding import Finding, Level

SUBJECT = "configuration"


def examine() -> Iterator[Finding]:
    """Return what the system checks say, but for what the project has silenced."""
    problems = [
        problem
        for problem in checks.run_checks(tags=[TAG, checks.Tags.database], databases=database.outbox_databases())
        if str(problem.id).startswith("outbox.") and not problem.is_silenced()
    ]
    for problem in problems:
        level = Level.ERROR if problem.is_serious() else Level.WARNING
        yield Finding(level, SUBJECT, f"({problem.id}) {problem.msg}", problem.hint or "")
    if not problems:
        yield Finding(Level.OK, SUBJECT, "the system checks find nothing")
