"""The Django app, which imports the modules with messages, consumers and check-back functions of all apps."""

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
        # Imported here, because these modules import models, which is not possible before the apps are loaded.
        import_module("outbox.checks")
        post_migrate.connect(import_module("outbox.after_migrate").prepare_database, sender=self)
        _import_celery_app()
        autodiscover_modules("messages", "consumers", "check_back")


def _import_celery_app() -> None:
    """
    Import the Celery app that a broker's OPTIONS name, unless a Celery app is imported already.

    Otherwise the first task or wakeup would use Celery's fallback app, whose server is on this host.
    """
    state: Any = sys.modules.get("celery._state")
    default = getattr(state, "default_app", None)
    if default is not None and default.main != "default":
        return
    # E001, E003 or E004 reports these errors. ImportError is also raised while the app's module is being imported.
    with suppress(ConfigurationError, ImportError):
        for broker in conf.settings().brokers.values():
            if path := broker.options.get("APP"):
                import_string(path).set_default()
