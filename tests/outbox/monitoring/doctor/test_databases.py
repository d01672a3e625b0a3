from contextlib import contextmanager

import pytest
from django.db import connections
from django.db.migrations.loader import MigrationLoader

from outbox import database
from outbox.database import partitions
from outbox.monitoring import doctor
from outbox.monitoring.doctor import check_databases

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

OTHER = "database 'other'"


@contextmanager
def changed(change, back):
    """Run SQL in the second database, and undo it after the block."""
    with database.connect("other") as connection:
        connection.execute(change)
        try:
            yield
        finally:
            connection.execute(back)


@pytest.fixture
def concerns(about):
    """Return findings other than the OK of the database, and without the settings of a test server."""

    def concerns():
        return [found for found in about(check_databases, OTHER) if found[0] != "ok" and "a crash may lose" not in found[1]]

    return concerns


class TestDatabases:
    def test_are_well_when_they_answer(self, about, concerns):
        partitions.create_partitions("other")

        assert about(check_databases, OTHER)[0][0] == "ok"
        assert about(check_databases, OTHER)[0][1].startswith("PostgreSQL ")
        assert concerns() == []

    def test_are_named_when_they_are_away(self, about, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setitem(connections["other"].settings_dict, "HOST", "127.0.0.1")
            patch.setitem(connections["other"].settings_dict, "PORT", 1)
            ((level, text),) = about(check_databases, OTHER)

        assert level == "error"
        assert text.startswith("cannot be reached: ")
        assert "\n" not in text

    def test_are_named_when_they_have_no_tables(self, about):
        with changed("ALTER TABLE outbox_wakeup RENAME TO was_wakeup", "ALTER TABLE was_wakeup RENAME TO outbox_wakeup"):
            found = about(check_databases, OTHER)

        assert found == [("warning", "It has no tables of the outbox.")]

    @pytest.mark.parametrize("app", ["outbox", "outbox_embedded", "outbox_pipeline"])
    def test_are_named_when_a_migration_is_missing(self, concerns, app):
        partitions.create_partitions("other")
        ((_, last),) = MigrationLoader(None).graph.leaf_nodes(app)
        move = "UPDATE django_migrations SET app = '{}' WHERE app = '{}' AND name = '" + last + "'"

        with changed(move.format("not yet", app), move.format(app, "not yet")):
            found = concerns()

        assert found == [("error", f"migrations are missing: {last}")]

    def test_are_named_when_their_clock_is_another(self, concerns, monkeypatch):
        partitions.create_partitions("other")
        monkeypatch.setattr(doctor, "VERSION_AND_TIME", doctor.VERSION_AND_TIME + " + interval '1 minute'")

        assert concerns() == [("warning", "its clock and this host's are 60 s apart")]

    def test_are_named_when_a_commit_waits_for_no_disk(self, about):
        name = connections["other"].settings_dict["NAME"]
        text = "synchronous_commit is off: a crash may lose committed messages together with your rows"

        with changed(
            f'ALTER DATABASE "{name}" SET synchronous_commit = off', f'ALTER DATABASE "{name}" RESET synchronous_commit'
        ):
            lax = about(check_databases, OTHER)
        with changed(f'ALTER DATABASE "{name}" SET synchronous_commit = on', f'ALTER DATABASE "{name}" RESET synchronous_commit'):
            strict = about(check_databases, OTHER)

        assert ("warning", text) in lax
        assert ("warning", text) not in strict
