"""
The test's time. Nothing sleeps: time passes by what is stored growing older.

Rows and broker hold times of the real clocks, the database's and ours. `age_rows` puts them back, so that what was due in
an hour is due now, and the code under test reads the same clocks as ever.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from django.db.models import DateTimeField, F

from outbox.database import outbox_apps
from outbox.message import Header
from outbox.models import MessageRow


class Clock:
    """Real time, which stands still during a call of the kit; `advance` adds to what has passed."""

    def __init__(self) -> None:
        self._still_at: datetime | None = None
        self._advanced = timedelta(0)

    def __call__(self) -> datetime:
        return self._still_at or datetime.now(UTC)

    def seconds(self) -> float:
        """Return the time that passes for whoever measures it, a relay's breaker for one."""
        return (self() + self._advanced).timestamp()

    def advance(self, by: timedelta) -> None:
        self._advanced += by

    @contextmanager
    def still(self) -> Iterator[None]:
        """Stop the clock inside the block."""
        self._still_at = self()
        try:
            yield
        finally:
            self._still_at = None


def age_rows(using: str, by: timedelta) -> None:
    """Put all times back in the tables that the outbox and its apps have in a database."""
    for model in (model for config in outbox_apps() for model in config.get_models()):
        times = [field.name for field in model._meta.fields if isinstance(field, DateTimeField)]
        if model._meta.managed and not model._meta.proxy and times:  # a view, or a proxy, has no rows of its own
            model._default_manager.using(using).update(**{name: F(name) - by for name in times})
    for row in MessageRow.objects.using(using).filter(headers__contains=Header.DELIVER_AT):
        headers = json.loads(row.headers)
        headers[Header.DELIVER_AT] = (datetime.fromisoformat(headers[Header.DELIVER_AT]) - by).isoformat()
        MessageRow.objects.using(using).filter(pk=row.pk).update(headers=json.dumps(headers))
