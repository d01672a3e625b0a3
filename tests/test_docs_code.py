"""The code that the documents show runs, and the commands that they name exist."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import get_commands, load_command_class

from outbox import conf
from outbox.pipeline import conf as pipeline_conf
from tests.quotes import python_blocks

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "docker/README.md", ROOT / "tests/README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Pages whose Python blocks run just as they stand, each in a process of its own.
ALONE = ["how-to/message-types.md", "how-to/deploy.md"]

# Pages whose Python blocks another test runs, or holds to be quotes of code that runs.
ELSEWHERE = {
    "tutorial.md": "journeys/test_tutorial.py",
    "how-to/admin.md": "outbox/admin/test_about.py",
    "how-to/archive.md": "outbox/pipeline/spark/archive/test_page.py",
    "how-to/celery-tasks.md": "outbox/celery/test_page.py",
    "how-to/async.md": "outbox/publishing/test_asgi.py",
    "how-to/extend.md": "outbox/test_extensions.py",
    "how-to/half-first.md": "outbox/half_first/test_page.py",
    "how-to/logs.md": "outbox/test_log_fields.py",
    "how-to/move-here.md": "outbox/celery/test_move_here.py",
    "how-to/several-databases.md": "outbox/test_several_databases.py",
    "how-to/test.md": "outbox/testing/test_plugin.py",
    "how-to/write-a-broker.md": "contracts/harness.py",
}

# Pages whose Python blocks are the setting OUTBOX.
SETTINGS = ["brokers/kafka.md", "brokers/rabbitmq.md", "brokers/rocketmq.md", "pipeline.md"]


def commands() -> Iterator[tuple[str, str]]:
    """Return each call of a command of ours that a page shows in a console, with its page."""
    for page in PAGES:
        for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL):
            for line in re.findall(r"^\$ .*manage\.py (outbox_\w+[^#\n|&>]*)", block, re.MULTILINE):
                yield str(page.relative_to(ROOT)), line


class TestPython:
    def test_is_run_on_every_page(self):
        shown = {
            str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md") if "```python" in page.read_text()
        }

        assert shown == {*ALONE, *ELSEWHERE, *SETTINGS}
        assert [test for test in ELSEWHERE.values() if not (ROOT / "tests" / test).exists()] == []

    @pytest.mark.parametrize("page", SETTINGS)
    def test_is_a_setting_without_a_fault(self, page: str, settings: Any):
        names: dict[str, Any] = {"INSTALLED_APPS": []}

        for block in python_blocks(page):
            exec(block, names)  # noqa: S102
            settings.OUTBOX = names["OUTBOX"]
            assert conf.settings() is not None
            assert pipeline_conf.settings() is not None

    @pytest.mark.parametrize(
        ("page", "block"), [(page, block) for page in ALONE for block in python_blocks(page)], ids=lambda value: str(value)[:30]
    )
    def test_runs_as_it_stands(self, page: str, block: str):
        done = subprocess.run([sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True)

        assert done.returncode == 0, f"{page}\n{done.stderr}"


class TestCommands:
    @pytest.mark.parametrize(("page", "line"), list(commands()))
    def test_take_what_the_page_gives_them(self, page: str, line: str):
        name, *arguments = shlex.split(line)
        command = load_command_class(get_commands()[name], name)

        command.create_parser("manage.py", name).parse_args(arguments)  # exits where it does not know one
