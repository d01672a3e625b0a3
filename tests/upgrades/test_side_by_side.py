"""Two releases side by side: for seconds here, for a minute by `make upgrade UPGRADE_FROM=v0.1.0 SECONDS=60`."""

import json
import os
from contextlib import closing
from pathlib import Path

import pytest
from django.conf import settings

from tests.upgrades.side_by_side import SideBySide, git, release_before, unpack

SECONDS = float(os.environ.get("UPGRADE_SECONDS", 6))
PATIENCE = 60 + SECONDS  # until all is settled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(SECONDS + PATIENCE + 240),
    pytest.mark.skipif(not (settings.BASE_DIR / ".git").exists(), reason="There is no git repository, so no other release."),
]


class TestTwoReleasesSideBySide:
    def test_lose_double_and_invent_nothing(self, fresh_database: str, tmp_path: Path):
        revision, old = release_before(), tmp_path / "old"
        old.mkdir()
        unpack(revision, old)
        both = SideBySide(fresh_database, old, tmp_path)

        with closing(both.processes):
            both.play(SECONDS)
            both.settle(PATIENCE)
            counts = both.counts()
            logs = both.processes.logs()

        print(json.dumps({"from": git("describe", "--always", revision), **both.report()}))  # noqa: T201  (with -s)
        assert counts == {"lost": [], "ghosts": [], "twice": [], "out of order": []}, logs
