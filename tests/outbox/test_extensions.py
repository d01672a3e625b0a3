"""An app of its own adds to the outbox what its extension says, and nothing of the outbox names it: tests/third_app."""

import uuid
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import psycopg
import pytest
from django.contrib import admin
from django.core.checks import registry, run_checks
from django.db import connection
from django.db.transaction import atomic
from django.urls import path, reverse
from prometheus_client import CollectorRegistry

from outbox import database, findings
from outbox.database import partitions
from outbox.extensions import Extension, extensions
from outbox.findings import RULES
from outbox.monitoring.attention import read_attention
from outbox.monitoring.doctor import _check_grants, check_configuration
from outbox.monitoring.metrics import OutboxCollector
from outbox.relay.maintenance import prune
from tests.quotes import is_quoted, python_blocks

pytestmark = pytest.mark.urls(__name__)

APP = "tests.third_app"
OLD = date(2001, 2, 3)
NOW = datetime(2001, 2, 20, 12, tzinfo=UTC)
LONG_AGO = datetime(2001, 2, 3, 12, tzinfo=UTC)

urlpatterns = [path("admin/", admin.site.urls)]


@pytest.fixture(autouse=True)
def copy(transactional_db, settings, monkeypatch):
    """Install the app, with its table; return its model."""
    monkeypatch.setattr(registry.registry, "registered_checks", set(registry.registry.registered_checks))
    settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, APP]
    from tests.third_app.models import Copy  # a model of an app that is installed

    with database.connect("default") as own:
        own.execute("CREATE TABLE third_app_copy (message_id uuid PRIMARY KEY, copied_at timestamptz NOT NULL)")
    yield Copy
    with database.connect("default") as own:
        own.execute("DROP TABLE third_app_copy")


class Silent(Exception):
    """An error without a text."""

    def __str__(self):
        raise RuntimeError


class Replica:
    """Reads the app's models elsewhere."""

    def db_for_read(self, model, **hints):
        return "other" if model._meta.app_label == "third_app" else None


@contextmanager
def without_table():
    """Hide the app's table, as before its migration."""
    with database.connect("default") as own:
        own.execute("ALTER TABLE third_app_copy RENAME TO third_app_lost")
    try:
        yield
    finally:
        with database.connect("default") as own:
            own.execute("ALTER TABLE third_app_lost RENAME TO third_app_copy")


def ids(problems):
    return {problem.id for problem in problems}


class TestThePage:
    def test_quotes_the_app(self):
        files = [f"tests/third_app/{name}.py" for name in ("apps", "extension", "findings")]

        assert all(is_quoted(block, *files) for block in python_blocks("how-to/extend.md"))

    def test_tells_all_that_an_extension_has(self):
        page = Path("docs/how-to/extend.md").read_text()

        assert [name for name in vars(Extension) if not name.startswith("_") and f"`{name}`" not in page] == []


class TestAnExtension:
    def test_is_found_by_the_config_of_its_app(self):
        assert [type(one).__name__ for one in extensions()] == ["EmbeddedExtension", "PipelineExtension", "ThirdAppExtension"]

    def test_is_gone_with_its_app(self, settings):
        settings.INSTALLED_APPS = [app for app in settings.INSTALLED_APPS if app != APP]

        assert [type(one).__name__ for one in extensions()] == ["EmbeddedExtension", "PipelineExtension"]

    @pytest.mark.parametrize("name", ["find_attention", "attention_kinds", "checks", "database_checks"])
    def test_says_what_took_the_place_of_an_attribute_of_former_versions(self, name):
        with pytest.raises(TypeError, match=rf"Theirs\.{name} .*(outbox\.findings|django\.core\.checks)"):
            type("Theirs", (Extension,), {name: ()})

    def test_adds_nothing_that_it_does_not_name(self):
        bare = Extension()

        assert not [*bare.tables, *bare.pages]
        assert bare.retention_hold is None
        assert not bare.has_archive()


class TestTables:
    def test_are_pruned(self, copy):
        old, new = uuid.uuid4(), uuid.uuid4()
        copy.objects.create(message_id=old, copied_at=LONG_AGO)
        copy.objects.create(message_id=new, copied_at=NOW)

        pruned = prune("default", now=NOW)

        assert pruned.rows["third_app_copy"] == 1
        assert [one.message_id for one in copy.objects.all()] == [new]

    def test_are_among_those_whose_grants_the_doctor_checks(self):
        with database.connect("default") as own:
            own.execute("CREATE ROLE third_app_reader")
            try:
                own.execute("GRANT ALL ON ALL TABLES IN SCHEMA public TO third_app_reader")
                own.execute("GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO third_app_reader")
                own.execute("REVOKE DELETE, INSERT ON third_app_copy FROM third_app_reader; SET ROLE third_app_reader")
                found = [finding.text for finding in _check_grants("database", own)]
            finally:
                own.execute("RESET ROLE; DROP OWNED BY third_app_reader; DROP ROLE third_app_reader")

        assert found == ["role third_app_reader lacks DELETE on third_app_copy"]

    def test_have_their_times_moved_in_tests(self, copy, outbox):
        copy.objects.create(message_id=uuid.uuid4(), copied_at=NOW)

        outbox.advance(timedelta(days=1))

        assert copy.objects.get().copied_at == NOW - timedelta(days=1)

    def test_of_the_app_that_are_not_pruned_keep_their_times_in_tests(self, copy, outbox, monkeypatch):
        monkeypatch.setattr("tests.third_app.extension.ThirdAppExtension.tables", {})
        copy.objects.create(message_id=uuid.uuid4(), copied_at=NOW)

        outbox.advance(timedelta(days=1))

        assert copy.objects.get().copied_at == NOW

    def test_may_be_read_from_a_replica(self, settings):
        settings.DATABASE_ROUTERS = [Replica()]

        assert "outbox.W021" not in ids(run_checks(tags=["outbox"]))

    def test_are_known_as_those_of_the_outbox(self):
        with without_table():
            problems = run_checks(tags=["database"], databases=["default"])

        [lacking] = [one for one in problems if one.id == "outbox.database_unfit"]
        assert "third_app_copy" in lacking.msg


class TestAHold:
    @pytest.fixture(autouse=True)
    def _old_day(self):
        with database.connect("default") as own:
            partitions.create_partition(own, OLD)
        yield
        with database.connect("default") as own:
            own.execute(f"DROP TABLE IF EXISTS {partitions.table_of(OLD)}")

    def test_keeps_messages(self):
        assert prune("default", now=NOW).kept == {OLD: "not copied yet"}

    def test_is_gone_with_its_app(self, settings):
        settings.INSTALLED_APPS = [app for app in settings.INSTALLED_APPS if app != APP]

        assert prune("default", now=NOW).days == [OLD]


class TestAttention:
    def test_is_on_the_list(self):
        [entry] = [one for one in read_attention(database.raw("default"), "default") if one.id == "third_app.no_copies"]

        assert entry.line == "Database 'default': (third_app.no_copies) No message was copied. Start the copier."

    def test_disappears_with_its_cause(self, copy):
        copy.objects.create(message_id=uuid.uuid4(), copied_at=NOW)

        assert "third_app.no_copies" not in [one.id for one in read_attention(database.raw("default"), "default")]

    def test_has_an_entry_for_an_extension_that_fails_and_all_others(self):
        before = [one.id for one in read_attention(database.raw("default"), "default") if one.id != "third_app.no_copies"]
        with without_table():
            found = read_attention(database.raw("default"), "default")

        assert [one.id for one in found] == [*before, "outbox.rule_fails"]
        assert found[-1].obj == "rule third_app.no_copies"
        assert 'relation "third_app_copy" does not exist' in found[-1].error

    @pytest.mark.parametrize("error", [psycopg.errors.QueryCanceled("canceling statement"), Silent()], ids=["time-out", "odd"])
    def test_has_an_entry_for_any_error_of_an_extension(self, monkeypatch, error):
        def fail(*arguments):
            raise error

        [place] = [place for place, one in enumerate(RULES) if one.ids == ("third_app.no_copies",)]
        monkeypatch.setattr(findings, "RULES", [*RULES[:place], RULES[place]._replace(find=fail), *RULES[place + 1 :]])

        [*_, entry] = read_attention(database.raw("default"), "default")

        assert entry.id == "outbox.rule_fails"

    def test_may_be_read_within_a_transaction_which_goes_on(self):
        with without_table(), atomic():
            [*_, entry] = read_attention(database.raw("default"), "default")
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1")

        assert entry.id == "outbox.rule_fails"

    def test_is_counted_by_id_and_subject(self):
        collected = CollectorRegistry()
        collected.register(OutboxCollector())

        labels = {"database": "default", "id": "third_app.no_copies", "level": "warning", "subject": "database 'default'"}
        assert collected.get_sample_value("outbox_findings", labels) == 1

    def test_is_silenced_like_a_system_check(self, settings):
        settings.SILENCED_SYSTEM_CHECKS = ["third_app.no_copies"]

        assert "third_app.no_copies" not in [one.id for one in read_attention(database.raw("default"), "default")]


class TestAPage:
    @pytest.fixture(autouse=True)
    def _registered(self, copy):
        admin.site.register(copy)
        yield
        admin.site.unregister(copy)

    @pytest.fixture(autouse=True)
    def _urls(self, monkeypatch, _registered):
        monkeypatch.setattr(f"{__name__}.urlpatterns", [path("admin/", admin.site.urls)])

    def test_is_linked_from_all_pages(self, admin_client):
        page = admin_client.get(reverse("admin:outbox_overview_changelist"))

        [link] = [one for one in page.context["outbox_links"] if one["name"] == "Copies"]
        assert link["url"] == reverse("admin:third_app_copy_changelist")

    def test_of_a_message_is_shown_when_the_database_no_longer_has_it(self, admin_client):
        gone = uuid.uuid4()

        page = admin_client.get(reverse("admin:outbox_messagerow_change", args=[gone]))

        assert page.text == f"A copy of {gone}."


class TestChecks:
    def test_are_run_with_those_of_the_outbox(self):
        assert "third_app.W001" in ids(run_checks(tags=["outbox"]))

    def test_ask_databases_where_these_are_named(self):
        assert "third_app.W002" not in ids(run_checks(tags=["outbox"]))
        assert "third_app.W002" in ids(run_checks(tags=["outbox", "database"], databases=["default"]))

    def test_are_among_those_of_the_doctor(self, monkeypatch):
        monkeypatch.setattr(database, "outbox_databases", lambda: ["default"])

        assert ("third_app.W001", "Set COPIES.") in [(finding.id, finding.msg) for finding in check_configuration()]
