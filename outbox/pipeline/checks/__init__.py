"""System checks of the pipeline's settings."""

from __future__ import annotations

from django.core.checks import register

from outbox.checks import TAG
from outbox.pipeline.checks import archive, audit, settings


def register_checks() -> None:
    """Register all checks; called once, when the app is ready."""
    register(settings.check_settings, TAG)
    register(archive.check_archive, TAG)
    register(audit.check_business_rows, TAG)
