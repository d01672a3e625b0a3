"""Run the system checks of the outbox, like `manage.py check --tag outbox --database ...`."""

from __future__ import annotations

from collections.abc import Iterator

from django.core import checks

from outbox import database
from outbox.checks import TAG
from outbox.monitoring.doctor.finding import Finding, Level

SUBJECT = "configuration"


def check() -> Iterator[Finding]:
    """Yield the messages of the system checks that the project has not silenced."""
    ours = tuple(f"{app.label}." for app in database.outbox_apps())
    problems = [
        problem
        for problem in checks.run_checks(tags=[TAG, checks.Tags.database], databases=database.outbox_databases())
        if str(problem.id).startswith(ours) and not problem.is_silenced()
    ]
    for problem in problems:
        level = Level.ERROR if problem.is_serious() else Level.WARNING
        yield Finding(level, SUBJECT, f"({problem.id}) {problem.msg}", problem.hint or "")
    if not problems:
        yield Finding(Level.OK, SUBJECT, "the system checks found no problems")
