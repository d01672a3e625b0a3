"""Check packages that cache what the ORM reads."""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.conf import settings
from django.core.checks import CheckMessage, register
from django.core.checks import Warning as Caution

from outbox.database import own_apps


@register("outbox")
def check_cachalot(**kwargs: Any) -> list[CheckMessage]:
    """
    W070: django-cachalot caches what the admin reads of the outbox's tables.

    Relays and consumers write these tables without the ORM, so nothing tells cachalot that they have changed, and the admin
    shows old counts and states. Name the apps of the outbox in `CACHALOT_UNCACHABLE_APPS`.
    """
    if not apps.is_installed("cachalot") or not getattr(settings, "CACHALOT_ENABLED", True):
        return []
    left_out = [*getattr(settings, "CACHALOT_UNCACHABLE_APPS", ())]
    cached = sorted(config.label for config in own_apps() if config.label not in left_out)
    if not cached:
        return []
    return [
        Caution(
            f"django-cachalot caches the tables of {', '.join(cached)}, which are written without the ORM, so the admin shows "
            "old rows.",
            hint=f"Set CACHALOT_UNCACHABLE_APPS = {(*left_out, *cached)!r}.",
            id="outbox.W070",
        )
    ]
