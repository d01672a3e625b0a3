"""A process that starts others which freeze themselves."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from outbox.consuming import register as consumers
from outbox.half_first.producers import close_idle
from outbox.topics import forget
from tests.journeys.frozen import settings as frozen
from tests.journeys.frozen.messages import register
from tests.journeys.frozen.places import Actor
from tests.journeys.tables import tables


@pytest.fixture
def actor(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Actor]:
    settings.OUTBOX = frozen.OUTBOX
    monkeypatch.setattr(consumers, "registered", {})
    register()
    forget("default")
    with tables("CREATE TABLE journey_frozen (number int)"), closing(Actor()) as found:
        yield found
    close_idle()
    forget("default")
