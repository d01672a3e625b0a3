"""Check Celery's server, where wakeups are sent over it, and that a worker takes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outbox import conf
from outbox.checks.celery import wakeup_app
from outbox.logs import cut, error_text, one_line
from outbox.monitoring.doctor.finding import Finding, Level
from outbox.monitoring.text import count
from outbox.publishing.wakeup import count_waiting

CONNECT_SECONDS = 5
ANSWER_SECONDS = 2.0  # in which workers answer


def check() -> Iterator[Finding]:
    """Connect to Celery's server, as a wakeup does; where tasks wait for a worker, ask for one."""
    for app in wakeup_app():
        try:
            with app.connection_for_write(connect_timeout=CONNECT_SECONDS) as connection:
                connection.connect()
                server = connection.as_uri()
                untaken = _untaken(app, connection, conf.settings().celery_queue)
        except Exception as error:  # transports raise errors of their own
            hint = 'Start it, or correct CELERY_BROKER_URL. Where all relays are resident, set OUTBOX["CELERY_WAKEUP"] = False.'
            yield Finding(
                Level.WARNING, "wakeups", f"Celery's server cannot be reached: {one_line(cut(error_text(error)))}", hint
            )
        else:
            yield Finding(Level.OK, "wakeups", f"Celery's server {server} can be reached")
            yield from untaken


def _untaken(app: Any, connection: Any, queue: str) -> list[Finding]:
    """Return a finding where tasks wait in a queue and no worker that answers takes from it."""
    waiting = count_waiting(connection, queue)
    if not waiting:
        return []
    workers = app.control.inspect(timeout=ANSWER_SECONDS, connection=connection).active_queues() or {}
    if any(one["name"] == queue for queues in workers.values() for one in queues):
        return []
    text = f"{count(waiting, 'task')} in Celery's queue {queue!r}, and no worker that answers takes from it"
    hint = (
        'Start a worker of Celery for this queue. Where all relays are resident, set OUTBOX["CELERY_WAKEUP"] = False, and empty '
        "the queue with Celery's command purge."
    )
    return [Finding(Level.WARNING, "wakeups", text, hint)]
