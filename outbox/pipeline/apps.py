"""The Django app of the data pipeline: audit, latency, backlog, archive."""

from __future__ import annotations

from importlib import import_module

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class PipelineAppConfig(AppConfig):
    name = "outbox.pipeline"
    label = "outbox_pipeline"
    verbose_name = _("Outbox pipeline")
    default_auto_field = "django.db.models.BigAutoField"
    outbox_extension = "outbox.pipeline.extension.PipelineExtension"

    def ready(self) -> None:
        for name in ("checks", "extension"):  # models cannot be imported before the apps are loaded
            import_module(f"outbox.pipeline.{name}")
