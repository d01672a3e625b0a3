"""The apps beside the outbox: each is added and removed with its migrations."""

import os
import subprocess
import sys

import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import connection, connections

from tests.quotes import ROOT

RELATIONS = r"SELECT relname FROM pg_class WHERE relname LIKE 'outbox\_%' AND relkind IN ('r', 'p', 'v', 'S', 'i')"


WITHOUT_MODEL = {"outbox_embedded": {"outbox_embedded_wakeup"}, "outbox_pipeline": set()}


def relations():
    with connection.cursor() as cursor:
        cursor.execute(RELATIONS)
        return {name for (name,) in cursor.fetchall()}


@pytest.mark.django_db
@pytest.mark.parametrize("label", WITHOUT_MODEL)
class TestMigrations:
    def test_of_an_app_take_back_what_they_made_and_make_it_again(self, label):
        tables = {model._meta.db_table for model in apps.get_app_config(label).get_models()} | WITHOUT_MODEL[label]
        before = relations()

        call_command("migrate", label, "zero", verbosity=0)
        without = relations()
        call_command("migrate", label, verbosity=0)

        assert tables <= before
        assert {name for name in before - without if not name.startswith(tuple(tables))} <= {"outbox_embedded_half_id"}
        assert not tables & without
        assert relations() == before


def migrate_to(alias):
    for label in ("outbox", "outbox_embedded", "outbox_pipeline"):
        call_command("migrate", label, database=alias, verbosity=0)


@pytest.fixture
def migrated(monkeypatch, django_db_setup, django_db_blocker):
    """An alias of a schema that has the tables of all apps."""
    alias, settings = "migrated", connection.settings_dict
    options = {**settings["OPTIONS"], "options": "-c search_path=migrated"}
    monkeypatch.setitem(connections.settings, alias, {**settings, "OPTIONS": options})
    with django_db_blocker.unblock(), connection.cursor() as cursor:
        cursor.execute("CREATE SCHEMA migrated")
        migrate_to(alias)
        yield alias
        connections[alias].close()
        del connections[alias]
        cursor.execute("DROP SCHEMA migrated CASCADE")
        connection.close()


def drop_tables_of_models(alias):
    """Drop the tables that Django knows, as django-test-migrations does before a test."""
    tables = connections[alias].introspection.django_table_names(only_existing=True, include_views=False)
    with connections[alias].cursor() as cursor:
        for table in tables:
            cursor.execute(f"DROP TABLE {table} CASCADE")
        cursor.execute("TRUNCATE django_migrations")


class TestTablesOfModelsThatAToolDrops:
    def test_are_made_again_under_a_new_source(self, migrated):
        source = source_of(migrated)

        drop_tables_of_models(migrated)
        migrate_to(migrated)

        assert connections[migrated].introspection.django_table_names(only_existing=True)
        assert source_of(migrated) not in ("", source)


def source_of(alias):
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT id FROM outbox_source")
        return cursor.fetchone()[0]


class TestASecondDatabaseOnSQLite:
    def test_is_migrated_without_our_tables(self, monkeypatch, tmp_path, django_db_blocker):
        other = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "other.sqlite3")}
        monkeypatch.setitem(connections.settings, "sqlite", {**connection.settings_dict, **other, "OPTIONS": {}})

        with django_db_blocker.unblock():
            call_command("migrate", database="sqlite", verbosity=0)
            tables = set(connections["sqlite"].introspection.table_names())
            for label in ("outbox_pipeline", "outbox_embedded", "outbox"):
                call_command("migrate", label, "zero", database="sqlite", verbosity=0)
            connections["sqlite"].close()
            del connections["sqlite"]

        assert "auth_user" in tables
        assert not [name for name in tables if name.startswith("outbox")]


class TestACeleryAppThatNothingImports:
    """It is named in a broker's OPTIONS only: the web process of a project whose __init__.py does not import it."""

    @pytest.mark.parametrize("first", ["", "import celery; celery.current_app.main; ", "import shopcelery; "])
    def test_is_the_one_that_tasks_and_wakeups_of_each_thread_find(self, tmp_path, first):
        (tmp_path / "shopcelery.py").write_text("from celery import Celery\napp = Celery('shop', broker='memory://')\n")
        look = (
            "with ThreadPoolExecutor() as pool: in_thread = pool.submit(lambda: celery.current_app.main).result()\n"
            "print(in_thread, celery.current_app.main)"
        )

        assert play(tmp_path, f"{first}django.setup(); import celery\n{look}") == "shop shop"

    def test_may_set_django_up_itself(self, tmp_path):
        (tmp_path / "shopcelery.py").write_text(
            "import django; django.setup()\nfrom celery import Celery\napp = Celery('shop', broker='memory://')\n"
        )

        assert play(tmp_path, "import shopcelery, celery; print(celery.current_app.main)") == "shop"


def play(folder, code):
    (folder / "shopsettings.py").write_text(
        "INSTALLED_APPS = ['outbox']\n"
        "tasks = {'BACKEND': 'outbox.celery.CeleryBroker', 'OPTIONS': {'APP': 'shopcelery.app'}}\n"
        "OUTBOX = {'BROKERS': {'default': {'BACKEND': 'outbox.brokers.memory.MemoryBroker'}, 'celery': tasks}}\n"
    )
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "shopsettings", "PYTHONPATH": f"{folder}:{ROOT}"}
    code = f"import django\nfrom concurrent.futures import ThreadPoolExecutor\n{code}"
    played = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert played.returncode == 0, played.stderr
    return played.stdout.strip()
