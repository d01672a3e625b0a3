"""The Django app: discovers messages, consumers and check-backs."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

from django.apps import AppConfig
from django.db.models.signals import post_migrate
from django.utils.module_loading import autodiscover_modules, import_string
from django.utils.translation import gettext_lazy as _

from outbox import conf
from outbox.errors import ConfigurationError


class OutboxConfig(AppConfig):
    name = "outbox"
    label = "outbox"
    verbose_name = _("Transactional outbox")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        # Models cannot be imported before the apps are loaded.
        import_module("outbox.checks")
        post_migrate.connect(import_module("outbox.after_migrate").prepare_database, sender=self)
        _import_celery_app()
        autodiscover_modules("messages", "consumers", "check_back")


def _import_celery_app() -> None:
    """
    Import the Celery app that a broker's OPTIONS name, where no other is imported, before a task or a wakeup looks for one.

    Celery's fallback app, with a server on this host, would take its place.
    """
    state: Any = sys.modules.get("celery._state")
    default = getattr(state, "default_app", None)
    if default is not None and default.main != "default":
        return
    with suppress(ConfigurationError, ImportError):  # E001 and E003 report it; or the app's module is being imported
        for broker in conf.settings().brokers.values():
            if path := broker.options.get("APP"):
                import_string(path).set_default()
