"""Check INSTALLED_APPS for apps that the settings need, and for a package that caches rows that the ORM reads."""

from __future__ import annotations

from collections.abc import Iterable

from django.apps import apps
from django.conf import settings
from django.core.checks import CheckMessage, Error
from django.core.checks import Warning as Caution

from outbox.checks.decorators import check
from outbox.checks.settings import known_settings, known_topics
from outbox.conf.apps import add_app, explain_pipeline, is_pipeline_missing
from outbox.database import own_apps


@check()
def check_broker_apps() -> Iterable[CheckMessage]:
    """
    E042: A topic's broker, or `OUTBOX["PIPELINE"]`, needs an app that is not in `INSTALLED_APPS`.

    Add the line that the hint shows and run `manage.py migrate`, or remove the setting.
    """
    missing: dict[tuple[str, str], list[str]] = {}
    for name, topic, broker in known_topics():
        if broker.app and not apps.is_installed(broker.app):
            missing.setdefault((topic.broker, broker.app), []).append(name)
    return [
        Error(
            f'OUTBOX["BROKERS"]["{alias}"] needs the tables of the app {app}, which is not in INSTALLED_APPS. '
            f"Its topics are: {', '.join(sorted(names))}.",
            hint=f"{add_app(app)} Then run manage.py migrate.",
            id="outbox.E042",
        )
        for (alias, app), names in sorted(missing.items())
    ]


@check()
def check_pipeline_app() -> Iterable[CheckMessage]:
    """Report, as E042, that `OUTBOX["PIPELINE"]` is set without its app."""
    if is_pipeline_missing(known_settings()):
        cause, hint = explain_pipeline()
        yield Error(f'OUTBOX["PIPELINE"] is set, but {cause}.', hint=f"{hint} Or remove the setting.", id="outbox.E042")


@check()
def check_cachalot() -> Iterable[CheckMessage]:
    """
    W070: django-cachalot caches rows that the admin reads from the outbox's tables.

    Relays and consumers write these tables without the ORM, so cachalot does not notice changes, and the admin shows old counts
    and states. Name the apps of the outbox in `CACHALOT_UNCACHABLE_APPS`.
    """
    excluded = [*getattr(settings, "CACHALOT_UNCACHABLE_APPS", ())]
    cached = sorted(config.label for config in own_apps() if config.label not in excluded)
    if cached and apps.is_installed("cachalot") and getattr(settings, "CACHALOT_ENABLED", True):
        tables = f"the tables of {', '.join(cached)}"
        text = f"django-cachalot caches {tables}, which are written without the ORM, so the admin shows old rows."
        yield Caution(text, hint=f"Set CACHALOT_UNCACHABLE_APPS = {(*excluded, *cached)!r}.", id="outbox.W070")
