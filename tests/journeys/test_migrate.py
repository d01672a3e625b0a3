"""`manage.py migrate` in an empty database, of anything and to any migration."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import psycopg
import pytest
from django.conf import settings

from outbox.database import partitions

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
