"""Check Celery's server, where wakeups are sent over it."""

from __future__ import annotations

from collections.abc import Iterator

from outbox.checks.celery import wakeup_app
from outbox.monitoring.doctor.finding import Finding, Level

CONNECT_SECONDS = 5


def check() -> Iterator[Finding]:
    """Connect to Celery's server, as a wakeup does."""
    for app in wakeup_app():
        try:
            with app.connection_for_write(connect_timeout=CONNECT_SECONDS) as connection:
                connection.connect()
                server = connection.as_uri()
        except Exception as error:  # transports raise errors of their own
            hint = 'Start it, or correct CELERY_BROKER_URL. Where all relays are resident, set OUTBOX["CELERY_WAKEUP"] = False.'
            yield Finding(Level.WARNING, "wakeups", f"Celery's server cannot be reached: {error!r}", hint)
        else:
            yield Finding(Level.OK, "wakeups", f"Celery's server {server} can be reached")
