"""Check packages that cache what the ORM reads."""

from __future__ import annotations

from collections.abc import Iterable

from django.apps import apps
from django.conf import settings
from django.core.checks import CheckMessage
from django.core.checks import Warning as Caution

from outbox.checks.decorators import check
from outbox.database import own_apps


@check()
def check_cachalot() -> Iterable[CheckMessage]:
    """
    W070: django-cachalot caches what the admin reads of the outbox's tables.

    Relays and consumers write these tables without the ORM, so nothing tells cachalot that they have changed, and the admin
    shows old counts and states. Name the apps of the outbox in `CACHALOT_UNCACHABLE_APPS`.
    """
    left_out = [*getattr(settings, "CACHALOT_UNCACHABLE_APPS", ())]
    cached = sorted(config.label for config in own_apps() if config.label not in left_out)
    if cached and apps.is_installed("cachalot") and getattr(settings, "CACHALOT_ENABLED", True):
        tables = f"the tables of {', '.join(cached)}"
        text = f"django-cachalot caches {tables}, which are written without the ORM, so the admin shows old rows."
        yield Caution(text, hint=f"Set CACHALOT_UNCACHABLE_APPS = {(*left_out, *cached)!r}.", id="outbox.W070")
