"""The Django app: discovers messages, consumers and check-backs; after a migration, writes topics and creates partitions."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

from django.apps import AppConfig
from django.db.models.signals import post_migrate
from django.utils.module_loading import autodiscover_modules, import_string

from outbox import conf
from outbox.errors import ConfigurationError, NotMigrated, OtherProject
from outbox.logs import get_logger

logger = get_logger(__name__)


class OutboxConfig(AppConfig):
    name = "outbox"
    label = "outbox"
    verbose_name = "Transactional outbox"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        import_module("outbox.checks")  # models cannot be imported before the apps are loaded
        _import_celery_app()
        autodiscover_modules("messages", "consumers", "check_back")
        post_migrate.connect(_prepare_database, sender=self)


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


def _prepare_database(*, using: str, **kwargs: object) -> None:
    """
    Store the project of the tables, write topic rows, and create the partitions of the message table ahead.

    Called after every migrate, also of other apps, and of this app to zero, after which there are no tables.
    """
    # models cannot be imported before the apps are loaded
    from outbox.database import connect, ensure_fit, has_outbox_tables, is_outbox_database, raw
    from outbox.database.identity import adopt
    from outbox.database.partitions import make_days
    from outbox.topics import write_topics

    if is_outbox_database(using) and has_outbox_tables(using):
        adopt(raw(using))
        try:
            with connect(using) as own:  # a signal may have led Django's connection to another schema
                ensure_fit(using, own)
        except (NotMigrated, OtherProject) as error:
            logger.error(str(error))
            return
        write_topics(using)
        make_days(using)
