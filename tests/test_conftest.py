import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

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


WITHOUT_CLIENTS = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in ("amqp", "rocketmq") else find_spec(name, *more)
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


class TestTheContract:
    def test_has_no_test_without_a_broker_where_a_client_is_not_installed(self):
        arguments = ["--collect-only", "-q", "-p", "no:xdist", "tests/contracts/test_renew.py"]

        outcome = subprocess.run([sys.executable, "-c", WITHOUT_CLIENTS, *arguments], capture_output=True, text=True)

        assert outcome.returncode == 0
        assert "test_is_refused_when_another_holds_the_message[memory]" in outcome.stdout
        assert "test_is_refused_when_the_time_was_over" not in outcome.stdout
