"""
The time of a test. Nothing sleeps: to let time pass, all stored times are moved back.

Rows and memory brokers have times of real clocks, the database's and Python's. `age_rows` moves these times back, so that
a message that was due in an hour is due now, while the code under test reads the real clocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from django.db import router
from django.db.models import DateTimeField, F, Model

from outbox.database import outbox_apps, own_apps
from outbox.extensions import extensions
from outbox.message import Header
from outbox.models import MessageRow


class Clock:
    """The real time, frozen during a call of the kit. Only `seconds` includes advances, since rows and brokers are aged."""

    def __init__(self) -> None:
        self._frozen_at: datetime | None = None
        self._advanced = timedelta(0)

    def __call__(self) -> datetime:
        return self._frozen_at or datetime.now(UTC)

    def seconds(self) -> float:
        """Return a time in seconds that includes advances, for example for a relay's breakers."""
        return (self() + self._advanced).timestamp()

    def advance(self, by: timedelta) -> None:
        self._advanced += by

    @contextmanager
    def still(self) -> Iterator[None]:
        """Freeze the clock inside the block."""
        self._frozen_at = self()
        try:
            yield
        finally:
            self._frozen_at = None


def age_rows(using: str, by: timedelta) -> None:
    """Move back all times in a database's tables of the outbox and its apps, and in the tables that extensions let it prune."""
    for model in _aged_models(using):
        times = [field.name for field in model._meta.fields if isinstance(field, DateTimeField)]
        if times:
            model._base_manager.using(using).update(**{name: F(name) - by for name in times})
    for row in MessageRow.objects.using(using).filter(headers__contains=Header.DELIVER_AT):
        headers = json.loads(row.headers)
        headers[Header.DELIVER_AT] = (datetime.fromisoformat(headers[Header.DELIVER_AT]) - by).isoformat()
        MessageRow.objects.using(using).filter(pk=row.pk).update(headers=json.dumps(headers))


def _aged_models(using: str) -> Iterator[type[Model]]:
    own = own_apps()
    pruned = {table for extension in extensions() for table in extension.tables}
    for config in outbox_apps():
        for model in config.get_models():
            has_rows = model._meta.managed and not model._meta.proxy  # views and proxies have no rows of their own
            if has_rows and router.allow_migrate_model(using, model) and (config in own or model._meta.db_table in pruned):
                yield model
