"""Importing the generated stubs has no effect on the process beside them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

IMPORT_STUBS = """
import logging, sys

changed = []
sys.addaudithook(lambda event, arguments: changed.append(arguments) if event in ("os.putenv", "os.unsetenv") else None)
{first}
import outbox.brokers.rocketmq.stubs

print(changed, logging.getLogger("rocketmq-python-client").handlers)
"""


@pytest.mark.timeout(60)
class TestImport:
    def test_writes_no_log_file_and_leaves_the_environment_alone(self, tmp_path: Path):
        said = run(IMPORT_STUBS.format(first=""), home=tmp_path)

        assert said == "[] []"
        assert list(tmp_path.iterdir()) == []

    def test_leaves_the_client_of_a_project_that_uses_it_as_it_is(self, tmp_path: Path):
        said = run(IMPORT_STUBS.format(first="import rocketmq"), home=tmp_path)

        assert said.startswith("[] [<RotatingFileHandler")


def run(program: str, *, home: Path) -> str:
    environment = {**os.environ, "HOME": str(home), "DJANGO_SETTINGS_MODULE": "tests.settings"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()
