import os
import subprocess
import sys
from pathlib import Path

import pytest

TEST = 'import pytest\n\n\ndef test_server():\n    pytest.skip("no server")\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "test_server.py").write_text(TEST)
    return tmp_path / "test_server.py"


def run(file: Path, *, ci: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "-p", "tests.conftest", "-p", "no:django", file]
    return subprocess.run(command, env={**os.environ, "CI": ci}, capture_output=True, text=True)


class TestASkippedTest:
    def test_is_a_failure_in_ci_and_says_why(self, file):
        outcome = run(file, ci="true")

        assert outcome.returncode == 1
        assert "test_server: Skipped: no server" in outcome.stdout

    def test_is_none_elsewhere(self, file):
        outcome = run(file, ci="")

        assert outcome.returncode == 0
