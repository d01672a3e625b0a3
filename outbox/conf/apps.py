"""The Django apps that some settings need in INSTALLED_APPS."""

from __future__ import annotations

from django.apps import apps

from outbox.conf.sections import Settings
from outbox.errors import ConfigurationError
from outbox.extensions import extended_apps

PIPELINE = "outbox.pipeline"  # reads `OUTBOX["PIPELINE"]`


def is_pipeline_missing(settings: Settings) -> bool:
    """Return whether there are settings for the pipeline, but its app is not installed with an AppConfig for the outbox."""
    return bool(settings.pipeline) and all(config.name != PIPELINE for config in extended_apps())


def add_app(app: str) -> str:
    """Return a sentence that says how to install an app."""
    return f'Add to the settings: INSTALLED_APPS += ["{app}"].'


def explain_pipeline() -> tuple[str, str]:
    """Return why the pipeline is missing, as the end of a sentence, and how to install the pipeline."""
    if apps.is_installed(PIPELINE):
        return (
            f"{PIPELINE} is installed with another AppConfig",
            "Derive this AppConfig from outbox.pipeline.apps.PipelineAppConfig.",
        )
    return f"{PIPELINE} is not in INSTALLED_APPS", f"{add_app(PIPELINE)} Then run manage.py migrate."


def require_outbox() -> None:
    """Raise ConfigurationError if Django has read INSTALLED_APPS, and the app outbox is not among them."""
    if apps.apps_ready and not apps.is_installed("outbox"):
        raise ConfigurationError(
            "The project uses outbox, which is not in INSTALLED_APPS.", hint=f"{add_app('outbox')} Then run manage.py migrate."
        )
