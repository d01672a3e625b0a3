"""The Django apps that some settings need in INSTALLED_APPS."""

from __future__ import annotations

from django.apps import apps

from outbox.conf.sections import Settings
from outbox.errors import ConfigurationError

PIPELINE = "outbox.pipeline"  # reads `OUTBOX["PIPELINE"]`


def is_pipeline_missing(settings: Settings) -> bool:
    """Return whether there are settings for the pipeline, but its app is not installed."""
    return bool(settings.pipeline) and not apps.is_installed(PIPELINE)


def add_app(app: str) -> str:
    """Return the sentence that says how to install an app."""
    return f'Add to the settings: INSTALLED_APPS += ["{app}"].'


def require_outbox() -> None:
    """Raise ConfigurationError if Django has read INSTALLED_APPS, and the app outbox is not there."""
    if apps.apps_ready and not apps.is_installed("outbox"):
        raise ConfigurationError(
            "The project uses outbox, which is not in INSTALLED_APPS.", hint=f"{add_app('outbox')} Then run manage.py migrate."
        )
