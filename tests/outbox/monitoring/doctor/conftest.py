from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outbox.findings import Finding

MEMORY = {"BACKEND": "outbox.brokers.memory.MemoryBroker"}


@pytest.fixture(autouse=True)
def _outbox(settings: Any, only_the_shops_types: None) -> None:
    topics = {name: {"TYPE": "transaction"} for name in settings.OUTBOX["TOPICS"]}
    settings.OUTBOX = {"BROKERS": {"default": MEMORY}, "TOPICS": topics, "CELERY_WAKEUP": False}


@pytest.fixture
def about() -> Callable[..., list[tuple[str, str]]]:
    """Run a check; return level and text of findings about a subject. Each but OK must have a hint."""

    def about(check: Callable[[], Iterator[Finding]], subject: str) -> list[tuple[str, str]]:
        found = [one for one in check() if one.subject == subject]
        assert all(bool(one.hint) is (one.level_name != "ok") for one in found), found
        return [(one.level_name, one.text) for one in found]

    return about
