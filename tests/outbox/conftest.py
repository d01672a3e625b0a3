from collections.abc import Iterator
from typing import Any

import pytest

from outbox import signals


@pytest.fixture
def alarms() -> Iterator[list[dict[str, Any]]]:
    """What a person was told to look at."""
    heard: list[dict[str, Any]] = []

    def hear(**alarm: Any) -> None:
        heard.append(alarm)

    signals.alarm.connect(hear)
    yield heard
    signals.alarm.disconnect(hear)
