"""`manage.py migrate` in an empty database, of anything and to any migration."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from django.conf import settings


@pytest.fixture
def migrate(fresh_database: str):
    def migrate(*target: str) -> None:
        command = [sys.executable, str(Path(settings.BASE_DIR) / "manage.py"), "migrate", "--verbosity", "0", *target]
        environment = {**os.environ, "DATABASE_URL": fresh_database, "DJANGO_SETTINGS_MODULE": "project.settings"}
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
