"""
What an app adds to the outbox: one class, which its `AppConfig` names::

    class ShippingConfig(AppConfig):
        name = "shipping"
        outbox_extension = "shipping.extension.ShippingExtension"

`outbox.embedded` and `outbox.pipeline` are added like this, and in no other way. See docs/how-to/extend.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec
from django.apps import AppConfig, apps
from django.utils.functional import Promise
from django.utils.module_loading import import_string

if TYPE_CHECKING:
    from django.contrib.admin import ModelAdmin
    from django.db.models import Model
    from django.http import HttpRequest, HttpResponse

ATTRIBUTE = "outbox_extension"  # of an AppConfig: the dotted path of its Extension


class RetentionHold(msgspec.Struct, frozen=True):
    """
    Messages that the prune keeps for an app, which drops their days itself.

    Args:
        reason: shown to operators for a day that is kept.
        retention: returns how long the app needs messages; None while it holds nothing.
        grace: a day held longer than this after its retention raises an alert.
        tables: tables whose rows the app deletes instead of the prune.
    """

    reason: str
    retention: Callable[[], timedelta | None]
    grace: timedelta
    tables: frozenset[str] = frozenset()


@dataclass(frozen=True, order=True, slots=True)
class Page:
    """
    A link at the top of the outbox's admin pages. Users who may view the model see it.

    Args:
        rank: its position; those of the core are from 10 to 85.
        view: the name of the view in the namespace `admin`.
    """

    rank: int
    name: str | Promise
    model: type[Model] = field(compare=False)
    view: str = field(compare=False)


# Attributes of earlier releases, and what to write now.
FORMER = {
    "find_attention": "Yield findings in a function with the decorator rule of outbox.findings.",
    "attention_kinds": "Name the ids in the decorator rule of outbox.findings.",
    **dict.fromkeys(["checks", "database_checks"], "Register them with django.core.checks.register and the tag outbox."),
}


class Extension:
    """
    What an app adds to the outbox. Each attribute and method has a default that adds nothing.

    The class is imported when all models are loaded, and may import those of its app. Modules that need the admin are imported
    in the method that uses them.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in FORMER.keys() & vars(cls):
            raise TypeError(f"{cls.__name__}.{name} is called by nobody any more. {FORMER[name]}")

    tables: Mapping[str, str] = {}
    """Tables to prune, in databases that have them: name -> SQL condition of rows past their retention, with `%(before)s`."""

    retention_hold: RetentionHold | None = None
    """Messages that are not dropped before the app has used them."""

    pages: Sequence[Page] = ()
    """Admin pages of the app, to be linked at the top of all pages of the outbox."""

    def consumer_groups(self, broker: str) -> Iterable[str]:
        """Return consumer groups of the app that read all topics of a broker, for `outbox_topics`."""
        return ()

    def has_archive(self) -> bool:
        """Return whether the app may have messages that were dropped from the database; the admin then shows its page."""
        return False

    def archived_message(self, model_admin: ModelAdmin[Any], request: HttpRequest, message_id: UUID) -> HttpResponse:
        """Return the admin page of a message that was dropped from the database."""
        raise NotImplementedError


def extended_apps() -> list[AppConfig]:
    """Return the installed apps that have an extension, in the order of INSTALLED_APPS."""
    return [config for config in apps.get_app_configs() if hasattr(config, ATTRIBUTE)]


def extensions() -> list[Extension]:
    """Return the extensions of the installed apps, in the order of INSTALLED_APPS."""
    return [import_string(getattr(config, ATTRIBUTE))() for config in extended_apps()]
