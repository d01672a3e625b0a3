"""Celery's server, where relays are nudged over it."""

from __future__ import annotations

from collections.abc import Iterator

from outbox.checks.celery import nudged_app
from outbox.monitoring.doctor.finding import Finding, Level

CONNECT_SECONDS = 5


def examine() -> Iterator[Finding]:
    """Connect to it as a nudge would."""
    for app in nudged_app():
        try:
            with app.connection_for_write(connect_timeout=CONNECT_SECONDS) as connection:
                connection.connect()
                server = connection.as_uri()
        except Exception as error:  # whatever a transport raises
            hint = 'Start it, or correct CELERY_BROKER_URL. Where all relays are resident, set OUTBOX["NUDGE"] = False.'
            yield Finding(Level.WARNING, "nudges", f"Celery's server cannot be reached: {error!r}", hint)
        else:
            yield Finding(Level.OK, "nudges", f"Celery's server {server} can be reached")
