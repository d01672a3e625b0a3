"""A process that starts others which freeze themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection

from outbox.consuming import register as consumers
from outbox.half_first.producers import close_idle
from outbox.topics import forget
from tests.journeys.frozen import settings as frozen
from tests.journeys.frozen.messages import register
from tests.journeys.frozen.places import Actor


@pytest.fixture
def actor(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Actor]:
    settings.OUTBOX = frozen.OUTBOX
    monkeypatch.setattr(consumers, "registered", {})
    register()
    forget("default")
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE IF EXISTS journey_frozen")
        cursor.execute("CREATE TABLE journey_frozen (number int)")
    found = Actor()
    yield found
    found.close()
    close_idle()
    forget("default")
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE journey_frozen")
