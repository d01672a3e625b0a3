"""The archiver is killed, as a process, at every step; whoever comes next finishes the day, and each row is there once."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.outbox.pipeline.spark.archive.conftest import PER_DAY, SECOND
from tests.outbox.pipeline.spark.archive.looks import books_left, in_database, in_lake, state_of

pytestmark = pytest.mark.slow

STEPS = ["after_plan", "after_write", "after_verify", "after_commit", "before_delete", "in_delete"]
HALF_AN_ARCHIVE, ONCE_THE_LAKE_HAS_IT = STEPS[1:3], STEPS[3:]

DAY = "2001-02-03"


def run(url, lake, *, failpoint=""):
    command = [sys.executable, "-m", "tests.outbox.pipeline.spark.archive.archiver", url, str(lake.root), str(SECOND)]
    environment = {**os.environ, "OUTBOX_FAILPOINTS": f"archive.{failpoint}=kill" if failpoint else ""}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


class TestACrash:
    @pytest.mark.parametrize("step", STEPS)
    def test_loses_nothing_doubles_nothing_and_leaves_no_half_archive(self, url, lake, ids, step):
        died = run(url, lake, failpoint=step)

        assert died.returncode == -signal.SIGKILL, died.stderr
        assert in_database() == ids
        assert in_lake(lake) == (ids[:PER_DAY] if step in ONCE_THE_LAKE_HAS_IT else [])

        done = run(url, lake)

        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["days"] == {DAY: PER_DAY}
        assert in_lake(lake) == ids[:PER_DAY]
        assert in_database() == ids[PER_DAY:]
        assert books_left() == dict.fromkeys(books_left(), 1) | {"inbox": PER_DAY}
        assert len(in_lake(lake, "inbox")) == PER_DAY
        assert state_of(DAY)[0] == "deleted"
        folder, attempt = lake.root / "messages" / DAY, "a1" if step in ONCE_THE_LAKE_HAS_IT else "a2"
        assert [commit.name for commit in lake.committed()] == [f"{DAY}.{attempt}"]
        assert [path.name for path in folder.iterdir()] == [attempt]
        assert (str(folder / "a1") in json.loads(done.stdout)["abandoned"]) == (step in HALF_AN_ARCHIVE)

    def test_of_several_archivers_one_after_the_other_comes_to_the_same(self, url, lake, ids):
        for step in STEPS:
            run(url, lake, failpoint=step)

        run(url, lake)

        assert in_lake(lake) == ids[:PER_DAY]
        assert in_database() == ids[PER_DAY:]
