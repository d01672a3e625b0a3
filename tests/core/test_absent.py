"""Nothing of an app is there that is not in INSTALLED_APPS."""

import subprocess
import sys
from importlib import import_module

import pytest
from django.apps import apps
from django.conf import settings as project_settings
from django.contrib import admin
from django.core.checks import registry, run_checks
from django.core.management import call_command, get_commands
from django.db import connection

from outbox.admin import pages
from outbox.extensions import extensions
from outbox.schedule import beat_schedule

APPS = ("outbox.embedded", "outbox.pipeline")

TABLES = r"SELECT relname FROM pg_class WHERE relname LIKE 'outbox\_%' AND relkind IN ('r', 'p', 'v')"

# Set up, checked, with the admin's addresses, in a process that has imported nothing else.
CHECKED = """
import sys
import django
django.setup()
from django.core.management import call_command
call_command("check")
print([name for name in sys.modules if name.startswith("outbox.embedded") or name.startswith("outbox.pipeline")])
"""


@pytest.mark.django_db
class TestTables:
    def test_are_those_of_the_core(self):
        with connection.cursor() as cursor:
            cursor.execute(TABLES)
            found = {name for (name,) in cursor.fetchall()}

        assert {"outbox_message", "outbox_batch", "outbox_inbox"} <= found
        theirs = ("outbox_embedded", "outbox_audit", "outbox_archived", "outbox_recorded")
        assert [name for name in found if name.startswith(theirs)] == []

    def test_are_no_more_where_somebody_imports_models_of_an_app(self):
        for app in APPS:
            import_module(f"{app}.models")

        assert {model.__module__.partition(".models")[0] for model in apps.get_app_config("outbox").get_models()} == {"outbox"}

    def test_lack_no_migration(self):
        call_command("makemigrations", "outbox", check=True, dry_run=True, verbosity=0)


class TestTheProject:
    def test_is_without_the_apps(self):
        assert not {*APPS} & {*project_settings.INSTALLED_APPS}

    def test_imports_nothing_of_them(self):
        done = subprocess.run([sys.executable, "-c", CHECKED], capture_output=True, text=True)

        assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.usefixtures("only_the_shops_types")
class TestChecks:
    def test_find_nothing(self):
        assert [one for one in run_checks(databases=["default"]) if str(one.id).startswith("outbox.")] == []

    def test_are_those_of_the_core(self):
        assert [check for check in registry.registry.get_checks() if check.__module__.startswith(APPS)] == []

    def test_name_the_line_of_a_broker_that_is_missing(self, settings):
        settings.OUTBOX = {"TOPICS": settings.OUTBOX["TOPICS"]}  # BROKERS is left out: the default broker is the embedded one

        [problem] = [one for one in run_checks() if str(one.id).startswith("outbox.E")]

        assert problem.id == "outbox.E042"
        assert 'INSTALLED_APPS += ["outbox.embedded"]' in problem.hint

    def test_name_the_line_of_settings_that_nothing_reads(self, settings):
        settings.OUTBOX = {**settings.OUTBOX, "PIPELINE": {"NO_SUCH_NAME": 1}}

        [problem] = [one for one in run_checks() if str(one.id).startswith("outbox.E")]

        assert problem.id == "outbox.E042"
        assert 'INSTALLED_APPS += ["outbox.pipeline"]' in problem.hint


class TestCommands:
    def test_are_those_of_the_core(self):
        ours = {name: app for name, app in get_commands().items() if name.startswith("outbox_")}

        assert set(ours.values()) == {"outbox"}
        assert not {"outbox_audit", "outbox_archive", "outbox_record"} & ours.keys()


class TestTheSchedule:
    def test_has_tasks_of_the_core(self):
        assert {entry["task"].rpartition(".")[0] for entry in beat_schedule(consume=["cart"]).values()} == {"outbox.tasks"}


class TestTheAdmin:
    def test_has_models_of_the_core(self):
        assert {model._meta.app_label for model in admin.site._registry if model.__module__.startswith("outbox.")} == {"outbox"}

    def test_links_to_pages_of_the_core(self):
        assert {page.model._meta.app_label for page in pages.pages()} == {"outbox"}


class TestExtensions:
    def test_are_none(self):
        assert extensions() == []
