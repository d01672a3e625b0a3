"""The Django app of the data pipeline: audit, latency, backlog, archive. The jobs themselves are in `spark/`, without Django."""

from __future__ import annotations

from django.apps import AppConfig


class PipelineConfig(AppConfig):
    name = "outbox.pipeline"
    label = "outbox_pipeline"
    verbose_name = "Outbox pipeline"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        # Here, since models cannot be imported before the apps are loaded.
        from outbox.database import retention_holds
        from outbox.monitoring import attention
        from outbox.pipeline import attention as audits
        from outbox.pipeline.archive import HOLD
        from outbox.pipeline.checks import register_checks
        from outbox.pipeline.recorder import PAST_RETENTION
        from outbox.relay.prune import register_table

        attention.register(audits.find)
        register_checks()
        retention_holds.register(HOLD)
        register_table("outbox_recorded", PAST_RETENTION)
