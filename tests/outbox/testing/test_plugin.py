"""The plugin in a separate project, whose settings it must not read before they are ready."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.quotes import is_quoted, python_blocks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
SHOP_TESTS = ["tests/shop/test_orders.py", "tests/shop/test_orders_unittest.py"]
PAGE = (ROOT / "docs/how-to/test.md").read_text()

NO_TESTS = ["-p", "no:django", "--ignore", "test_orders.py"]

SETTINGS = """
import os
assert os.environ["DATABASE_URL"].startswith("postgresql://")
SECRET_KEY = "a test"
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes", "rest_framework", "outbox"]
DATABASES = {"default": {"ENGINE": "django.db.backends.postgresql", "NAME": "shop"}}
OUTBOX = {"TOPICS": {"orders": {}}}
USE_TZ = True
"""

TEST = """
import os
from outbox import Message, publish, atomic

class OrderPlaced(Message):
    order_id: int

    class Meta:
        topic = "orders"

def test_published(outbox):
    with atomic():
        publish(OrderPlaced(order_id=1))

    outbox.assert_published(OrderPlaced, order_id=1)
    assert outbox.run_until_idle().sent == 1

def test_server():
    assert os.environ["PGHOST"] in os.environ["DATABASE_URL"]
"""


UNRELATED = """
import pytest
from django.contrib.auth.models import Group

@pytest.mark.django_db
def test_staff():
    assert Group.objects.create(name="staff").pk
"""


@pytest.fixture
def run(tmp_path):
    """Run pytest in a project of a user without a server; return the process."""

    def run(*options, settings=SETTINGS, **environment):
        (tmp_path / "settings.py").write_text(settings)
        (tmp_path / "test_orders.py").write_text(TEST)
        kept = {name: value for name, value in os.environ.items() if name not in ("DATABASE_URL", "PYTEST_ADDOPTS")}
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "outbox.testing.plugin", *options],
            cwd=tmp_path,
            env={**kept, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", **environment},
            capture_output=True,
            text=True,
        )

    return run


class TestWithoutMigrations:
    @pytest.mark.parametrize(
        ("options", "settings"),
        [(["--nomigrations"], SETTINGS), ([], SETTINGS + 'DATABASES["default"]["TEST"] = {"MIGRATE": False}')],
        ids=["of pytest", "of settings"],
    )
    def test_tests_that_do_not_publish_pass_and_are_told_why_others_do_not(self, run, tmp_path, options, settings):
        (tmp_path / "test_staff.py").write_text(UNRELATED)

        outcome = run(
            "--ds", "settings", "-o", "outbox_postgres=true", "-o", "log_cli=true", *options, "test_staff.py", settings=settings
        )

        assert outcome.returncode == 0, outcome.stdout + outcome.stderr
        assert "1 passed" in outcome.stdout
        assert "were made without its migrations, so nothing can be published there" in outcome.stdout + outcome.stderr


class TestThePlugin:
    def test_starts_a_server_where_the_page_says_so(self, run, tmp_path):
        [block] = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
        (tmp_path / "pyproject.toml").write_text(block)

        outcome = run("--ds", "settings")

        assert outcome.returncode == 0, outcome.stdout + outcome.stderr
        assert re.search(r"^PostgreSQL: postgres .* started for these tests$", outcome.stdout, re.MULTILINE)
        assert "2 passed" in outcome.stdout

    def test_refuses_to_start_one_that_the_settings_do_not_lead_to(self, run):
        named = SETTINGS.replace('"NAME": "shop"', '"NAME": "shop", "HOST": "db.internal"')

        outcome = run("--ds", "settings", "--outbox-postgres", settings=named)

        assert outcome.returncode == pytest.ExitCode.USAGE_ERROR
        assert "DATABASES['default'] names HOST 'db.internal', so the tests would not use the server" in outcome.stderr
        assert "Leave HOST out, or read DATABASE_URL in the settings" in outcome.stderr

    def test_starts_one_where_a_database_of_several_leads_to_it(self, run):
        two = '"other": {"ENGINE": "django.db.backends.postgresql", "NAME": "old", "HOST": "db.internal"}, "default"'

        outcome = run("--ds", "settings", "--outbox-postgres", "-k", "server", settings=SETTINGS.replace('"default"', two))

        assert outcome.returncode == 0, outcome.stdout + outcome.stderr

    def test_leaves_a_server_alone_that_is_there(self, run):
        outcome = run(*NO_TESTS, "--outbox-postgres", DATABASE_URL="postgresql://somewhere/else")

        assert "PostgreSQL: the server of DATABASE_URL" in outcome.stdout

    def test_starts_none_unless_it_is_asked(self, run):
        outcome = run(*NO_TESTS)

        assert "test session starts" in outcome.stdout
        assert "PostgreSQL:" not in outcome.stdout

    def test_says_what_to_install_where_there_are_no_programs(self, run, tmp_path):
        outcome = run(*NO_TESTS, "--outbox-postgres", PG_BIN=str(tmp_path))

        assert outcome.returncode == pytest.ExitCode.USAGE_ERROR
        assert "no programs initdb and postgres" in outcome.stderr

    def test_imports_no_django(self):
        code = "import sys, outbox.testing.plugin; sys.exit('django' in sys.modules)"

        assert subprocess.run([sys.executable, "-c", code]).returncode == 0

    def test_is_found_by_pytest_where_the_package_is_installed(self):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

        assert project["entry-points"]["pytest11"] == {"outbox.testing.plugin": "outbox.testing.plugin"}


class TestThePageOfTesting:
    @pytest.mark.parametrize("block", python_blocks("how-to/test.md"))
    def test_quotes_tests_that_run(self, block):
        header = re.match(r"class \w+.*\n", block)
        body = block[header.end() :] if header else block

        assert not header or is_quoted(header[0], *SHOP_TESTS)
        assert is_quoted(body, *SHOP_TESTS)
