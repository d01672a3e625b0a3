"""OPTIONS of the Celery broker."""

from __future__ import annotations

from datetime import timedelta

from celery import Celery, current_app
from django.utils.module_loading import import_string

from outbox.brokers.options import BrokerOptions
from outbox.errors import ConfigurationError


class CeleryOptions(BrokerOptions, frozen=True):
    """The Celery app whose broker gets the tasks, and the timeout of a send. Celery's own settings have the broker's address."""

    app: str = ""  # dotted path of the Celery app, such as "shop.celery.app"; "": the current app
    timeout: timedelta = timedelta(seconds=10)  # for one batch, until the server has confirmed all its messages


def find_app(options: CeleryOptions) -> Celery:
    """
    Return the Celery app whose broker gets the tasks.

    Raises:
        ConfigurationError: `OPTIONS["APP"]` does not name a Celery app.
    """
    if not options.app:
        return current_app
    try:
        app = import_string(options.app)
    except ImportError as error:
        raise ConfigurationError(
            f'OPTIONS["APP"] {options.app!r} cannot be imported: {error}.', hint="Correct the path."
        ) from error
    if not isinstance(app, Celery):
        raise ConfigurationError(
            f'OPTIONS["APP"] {options.app!r} is not a Celery app.', hint="Name the object that Celery() returned."
        )
    return app
