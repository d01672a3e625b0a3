import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outbox.consuming import register
from outbox.testing import programs


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may enter, unlike pytest's own, because the server does not run as root."""
    folder = Path(tempfile.mkdtemp(prefix="Test-Postgres-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def no_system_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PG_BIN", raising=False)
    monkeypatch.setattr(programs, "_system_folders", list)


@pytest.fixture
def own_topics(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Topics of the test, and no consumers, because those of the shop need its topics."""
    settings.OUTBOX = {"TOPICS": {"made": {}, "moved": {"TYPE": "fifo"}, "due": {"TYPE": "delay"}}}
    monkeypatch.setattr(register, "registered", {})


@pytest.fixture
def handled(own_topics: None) -> Callable[..., list[Any]]:
    """Register a handler for messages of a type; return the list to which it adds them."""

    def handle(kind: Any, then: Callable[[Any], object] = lambda message: None, **options: Any) -> list[Any]:
        seen: list[Any] = []

        def handler(message: Any, context: Any) -> None:
            then(message)
            seen.append(message)

        register.consumer(kind, **{"group": "test", **options})(handler)
        return seen

    return handle
