"""`manage.py migrate` in an empty database, of anything and to any migration."""

import os
import re
import subprocess
import sys
from ast import literal_eval
from datetime import UTC, datetime
from pathlib import Path

import psycopg
import pytest
from django.conf import settings
from django.db.migrations.loader import MigrationLoader

from outbox.database import partitions
from outbox.topics import LAST_MIGRATION

pytestmark = pytest.mark.slow


@pytest.fixture
def settings_module(monkeypatch: pytest.MonkeyPatch):
    """Return a function that names the module of the settings."""

    def settings_module(name: str) -> None:
        monkeypatch.setenv("DJANGO_SETTINGS_MODULE", name)

    settings_module("project.settings")
    return settings_module


@pytest.fixture
def migrate(fresh_database: str, settings_module):
    def migrate(*target: str) -> None:
        command = [sys.executable, str(Path(settings.BASE_DIR) / "manage.py"), "migrate", "--verbosity", "0", *target]
        environment = {**os.environ, "DATABASE_URL": fresh_database}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    return migrate


@pytest.fixture
def has_table(fresh_database: str):
    def has_table(name: str) -> bool:
        with psycopg.connect(fresh_database) as connection:
            return connection.execute("SELECT to_regclass(%s) IS NOT NULL", [name]).fetchone() == (True,)

    return has_table


class TestMigrate:
    def test_of_another_app_needs_no_table_of_ours(self, migrate, has_table):
        migrate("contenttypes")

        assert not has_table("outbox_topic")

    @pytest.mark.timeout(180)
    def test_goes_to_each_migration_of_the_outbox_and_back(self, migrate, has_table):
        migrate("outbox", "0001")
        assert has_table("outbox_topic")
        migrate("sessions")

        migrate()
        assert has_table("outbox_process")

        for app in ("outbox_pipeline", "outbox_embedded", "outbox"):
            migrate(app, "zero")
        migrate("auth")
        assert not has_table("outbox_topic")

        migrate()
        assert has_table("outbox_process")

    @pytest.mark.timeout(180)
    def test_works_on_connections_that_bind_on_the_server_and_prepare_everything(self, migrate, has_table, settings_module):
        settings_module("tests.journeys.binding_settings")

        migrate()

        assert has_table("outbox_process")
        assert has_table(partitions.table_of(datetime.now(UTC).date()))


SETTINGS = """
import os

import dj_database_url

SECRET_KEY = "x"
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.postgres", "outbox", "outbox.embedded", "books"]
DATABASES = {"default": dj_database_url.config()}
OUTBOX = {"TOPICS": {"books": {}}, "CELERY_WAKEUP": False}
"""

MIGRATION = """
from django.db import migrations

from outbox import publish_raw


def publish(apps, schema_editor):
    publish_raw("books", {"title": "Emma"})


class Migration(migrations.Migration):
    dependencies = [DEPENDENCY]
    operations = [migrations.RunPython(publish)]
"""


class TestADataMigrationThatPublishes:
    @pytest.fixture
    def app(self, tmp_path: Path) -> Path:
        """The only migration of an app that comes before the outbox in the order of names."""
        for folder in ("books", "books/migrations"):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "__init__.py").touch()
        (tmp_path / "settings.py").write_text(SETTINGS)
        return tmp_path / "books/migrations/0001_initial.py"

    def test_is_told_which_dependency_it_lacks(self, app: Path, fresh_database: str):
        def migrate(dependency: str) -> subprocess.CompletedProcess[str]:
            app.write_text(MIGRATION.replace("DEPENDENCY", dependency))
            environment = {**os.environ, "DATABASE_URL": fresh_database, "DJANGO_SETTINGS_MODULE": "settings"}
            environment["PYTHONPATH"] = os.pathsep.join([str(app.parents[2]), str(settings.BASE_DIR)])
            command = [sys.executable, "-m", "django", "migrate", "--verbosity", "0"]
            return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

        refused = migrate("")
        (dependency,) = re.findall(r"If a migration publishes, add (\(.*\)) to its dependencies", refused.stderr)
        done = migrate(dependency)

        assert (done.returncode, done.stderr) == (0, "")
        with psycopg.connect(fresh_database) as connection:
            assert connection.execute("SELECT count(*) FROM outbox_ticket").fetchone() == (1,)

    def test_has_that_of_the_outbox_that_is_the_last(self):
        (last,) = MigrationLoader(None).graph.leaf_nodes("outbox")

        assert literal_eval(LAST_MIGRATION) == last
