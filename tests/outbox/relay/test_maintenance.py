import logging
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connections
from psycopg import errors

from outbox import database
from outbox.brokers.memory import MemoryBroker
from outbox.database import loop_errors, partitions
from outbox.errors import NotMigrated
from outbox.models import Duplicate, Process, State
from outbox.relay.maintenance import MAINTENANCE, maintain, prune_brokers
from tests.factories import BatchFactory, message_id


@pytest.fixture
def refuse_days(monkeypatch):
    """Have the database refuse the partitions of coming days with an error."""

    def use(error):
        def refuse(using):
            raise error

        monkeypatch.setattr(partitions, "create_partitions", refuse)

    return use


@pytest.mark.django_db(transaction=True)
class TestKeepUp:
    def test_makes_days_ahead_and_prunes(self):
        last = datetime.now(UTC).date() + timedelta(days=7)
        with database.connect("default") as own:
            own.execute(f"DROP TABLE {partitions.table_of(last)}")

        done = maintain("default")

        assert done.made == [last]
        assert done.rows["outbox_inbox"] == 0

    def test_prunes_although_days_cannot_be_made(self, refuse_days):
        refuse_days(errors.DiskFull("no space left on device"))
        Duplicate.objects.create(consumer_group="g", message_id=message_id(), topic="t", delivery_count=2, dropped_at=LONG_AGO)

        with pytest.raises(errors.DiskFull):
            maintain("default")

        assert not Duplicate.objects.exists()

    @pytest.mark.parametrize("kind", [errors.InsufficientPrivilege, errors.ObjectNotInPrerequisiteState, errors.DiskFull])
    def test_notes_what_somebody_has_to_correct(self, refuse_days, kind):
        refuse_days(kind("no"))

        with pytest.raises(kind):
            maintain("default")

        assert loop_errors.read("relay", "default", "default") == {MAINTENANCE: "no"}

    @pytest.mark.parametrize("kind", [errors.DeadlockDetected, errors.LockNotAvailable, errors.AdminShutdown])
    def test_does_not_note_what_passes_by_itself(self, refuse_days, kind):
        refuse_days(kind("no"))

        with pytest.raises(kind):
            maintain("default")

        assert loop_errors.read("relay", "default", "default") == {}

    def test_forgets_an_error_after_which_another_process_had_its_turn(self, refuse_days, monkeypatch):
        refuse_days(errors.InsufficientPrivilege("no"))
        with pytest.raises(errors.InsufficientPrivilege):
            maintain("default")
        assert loop_errors.read("relay", "default", "default") == {MAINTENANCE: "no"}

        monkeypatch.setattr(loop_errors, "FORGET_SECONDS", 0.0)

        assert loop_errors.read("relay", "default", "default") == {}

    def test_forgets_silent_processes(self):
        Process.objects.create(kind="relay", host="h", pid=1, beat_at=datetime.now(UTC) - timedelta(minutes=6))

        maintain("default")

        assert not Process.objects.exists()

    def test_refuses_a_database_without_tables(self):
        with database.connect("default") as own:
            own.execute("ALTER TABLE outbox_wakeup RENAME TO elsewhere")
            try:
                with pytest.raises(NotMigrated):
                    maintain("default")
            finally:
                own.execute("ALTER TABLE elsewhere RENAME TO outbox_wakeup")


LONG_AGO = datetime(2020, 2, 3, 12, tzinfo=UTC)
A_MINUTE = timedelta(minutes=1)

PREPARE = """
INSERT INTO outbox_batch (topic_id, message_ids, half_ids, state, decided_at)
VALUES (1, ARRAY[gen_random_uuid()], ARRAY['h'], %(state)s, %(decided_at)s)
"""


@pytest.fixture
def kept_since(settings, monkeypatch):
    """The `keep_since` of each prune of the memory broker."""
    settings.OUTBOX = {"BROKERS": {"default": {"BACKEND": "outbox.brokers.memory.MemoryBroker"}}}
    told: list[datetime] = []
    monkeypatch.setattr(MemoryBroker, "prune", lambda self, *, keep_since: told.append(keep_since) or 0)
    return told


@pytest.fixture
def add_database():
    """Add an alias of another database."""
    added: list[str] = []

    def add(alias: str, **changes: object) -> None:
        connections.settings[alias] = {**connections.settings["default"], **changes}
        added.append(alias)

    yield add
    for alias in added:
        del connections.settings[alias]
        if hasattr(connections, alias):
            del connections[alias]


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
class TestPruneBrokers:
    def test_calls_until_nothing_is_left(self, settings, monkeypatch):
        settings.OUTBOX = {"BROKERS": {"default": {"BACKEND": "outbox.brokers.memory.MemoryBroker"}}}
        left = [3, 2, 0]
        monkeypatch.setattr(MemoryBroker, "prune", lambda self, *, keep_since: left.pop(0))

        assert prune_brokers(["default", "default"]) == {"default": 5}
        assert left == []

    @pytest.mark.parametrize("alias", ["default", "other"])
    def test_keeps_what_was_stored_since_the_first_decision_that_is_open_in_any_database(self, kept_since, alias):
        BatchFactory(state=State.PREPARED, decided_at=datetime.now(UTC))
        with database.connect(alias) as own:
            own.execute(PREPARE, {"decided_at": LONG_AGO, "state": State.PREPARED})

        prune_brokers(["default"])

        assert kept_since == [LONG_AGO - A_MINUTE]

    @pytest.mark.parametrize("state", [State.SENT, State.DEAD, State.CLAIMED])
    def test_does_not_wait_for_what_is_not_decided_or_confirmed(self, kept_since, state):
        BatchFactory(state=state, decided_at=LONG_AGO, sent_at=LONG_AGO if state == State.SENT else None)

        prune_brokers(["default"])

        assert abs(kept_since[0] + A_MINUTE - datetime.now(UTC)) < A_MINUTE

    def test_prunes_nothing_while_a_database_cannot_be_read(self, kept_since, add_database, caplog):
        add_database("away", HOST="127.0.0.1", PORT="1")

        with caplog.at_level(logging.WARNING):
            assert prune_brokers(["default"]) == {}

        assert kept_since == []
        assert "Brokers are not pruned now" in caplog.text
        assert "'away' cannot be read" in caplog.text

    def test_passes_over_a_database_without_the_outbox(self, kept_since, add_database):
        add_database("shop", NAME="postgres")

        prune_brokers(["default"])

        assert len(kept_since) == 1
