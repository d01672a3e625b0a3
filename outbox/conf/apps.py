"""The Django apps that settings need beside the core."""

from __future__ import annotations

from django.apps import apps

from outbox.conf.sections import Settings

PIPELINE = "outbox.pipeline"  # reads `OUTBOX["PIPELINE"]`


def is_pipeline_missing(settings: Settings) -> bool:
    """Return whether settings are for the pipeline, and its app is not installed."""
    return bool(settings.pipeline) and not apps.is_installed(PIPELINE)


def add_app(app: str) -> str:
    """Return the sentence with the line that installs an app."""
    return f'Add to the settings: INSTALLED_APPS += ["{app}"].'
