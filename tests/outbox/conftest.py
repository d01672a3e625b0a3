from collections.abc import Iterator
from typing import Any

import pytest

from outbox import message, signals


@pytest.fixture
def alarms() -> Iterator[list[dict[str, Any]]]:
    """What a person was told to look at."""
    heard: list[dict[str, Any]] = []

    def hear(**alarm: Any) -> None:
        heard.append(alarm)

    signals.alarm.connect(hear)
    yield heard
    signals.alarm.disconnect(hear)


@pytest.fixture
def only_the_shops_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the message types of the shop; other tests' modules define some that the system checks complain about."""
    shops = {name: one for name, one in message._types.items() if not one.__module__.startswith("tests.")}
    monkeypatch.setattr(message, "_types", shops)
