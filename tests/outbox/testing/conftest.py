import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox.testing import programs


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may enter, as the server does not run as root; pytest's own are closed."""
    folder = Path(tempfile.mkdtemp(prefix="Test-Postgres-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def no_system_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PG_BIN", raising=False)
    monkeypatch.setattr(programs, "_system_folders", list)
