"""Check that apps which settings need are installed: those of brokers with tables, and the pipeline."""

from __future__ import annotations

from collections.abc import Iterable

from django.apps import apps
from django.core.checks import CheckMessage, Error

from outbox.checks.decorators import check
from outbox.checks.settings import known_settings, known_topics
from outbox.conf.apps import add_app, explain_pipeline, is_pipeline_missing


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
