"""
Extensions: an app adds to the outbox with one class, which the app's `AppConfig` names::

    class ShippingConfig(AppConfig):
        name = "shipping"
        outbox_extension = "shipping.extension.ShippingExtension"

`outbox.embedded` and `outbox.pipeline` use only this mechanism, too. See docs/how-to/extend.md.
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

ATTRIBUTE = "outbox_extension"  # the attribute of an AppConfig with the dotted path of its Extension


class RetentionHold(msgspec.Struct, frozen=True):
    """
    Messages that pruning leaves to an app, which drops their daily partitions itself.

    Args:
        reason: the reason that operators are shown for a partition that is kept.
        retention: returns how long the app needs messages; None while it needs none.
        grace: an alert is raised for a partition that is kept for longer than this after the retention.
        tables: tables whose rows the app deletes itself, so that pruning does not.
    """

    reason: str
    retention: Callable[[], timedelta | None]
    grace: timedelta
    tables: frozenset[str] = frozenset()


@dataclass(frozen=True, order=True, slots=True)
class Page:
    """
    A link at the top of the outbox's admin pages. Users who may view the model see the link.

    Args:
        rank: the position of the link; the links of the outbox itself have ranks from 10 to 85.
        view: the name of the view in the namespace `admin`.
    """

    rank: int
    name: str | Promise
    model: type[Model] = field(compare=False)
    view: str = field(compare=False)


# Attributes of earlier releases, and the sentence that names their replacement.
FORMER = {
    "find_attention": "Yield findings in a function with the decorator rule of outbox.findings.",
    "attention_kinds": "Name the ids in the decorator rule of outbox.findings.",
    **dict.fromkeys(["checks", "database_checks"], "Register them with django.core.checks.register and the tag outbox."),
}


class Extension:
    """
    Base class of extensions. The default of each attribute and method adds nothing.

    The class is imported after all models are loaded, so its module may import models. Import modules that need the admin in the
    method that uses them.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in FORMER.keys() & vars(cls):
            raise TypeError(f"{cls.__name__}.{name} is no longer used. {FORMER[name]}")

    tables: Mapping[str, str] = {}
    """Tables to prune: name -> SQL condition for rows older than the time `%(before)s`. Missing tables are skipped."""

    retention_hold: RetentionHold | None = None
    """Messages that pruning leaves to the app."""

    pages: Sequence[Page] = ()
    """Admin pages of the app that are linked at the top of all pages of the outbox."""

    def consumer_groups(self, broker: str) -> Iterable[str]:
        """Return the app's consumer groups that read all topics of a broker, for the command `outbox_topics`."""
        return ()

    def has_archive(self) -> bool:
        """Return whether the app may have messages that were dropped from the database. If so, the admin shows its page."""
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
