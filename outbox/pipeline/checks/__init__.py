"""System checks of the pipeline's settings. docs/reference/checks.md is generated from their docstrings."""

from __future__ import annotations

from django.core.checks import Tags, register

from outbox.checks import TAG
from outbox.pipeline.checks import archive, audit, settings

ALWAYS = (settings.check_settings, archive.check_archive, audit.check_business_rows)
WITH_DATABASES = (audit.check_conditions,)


def register_checks() -> None:
    """Register all checks. Called once, when the app is ready."""
    for check in ALWAYS:
        register(check, TAG)
    for check in WITH_DATABASES:
        register(check, TAG, Tags.database)
