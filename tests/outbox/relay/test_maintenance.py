from datetime import UTC, datetime, timedelta

import pytest

from outbox import database
from outbox.brokers.memory import MemoryBroker
from outbox.database import partitions
from outbox.errors import NotMigrated
from outbox.models import Process
from outbox.relay.maintenance import maintain, prune_brokers


@pytest.mark.django_db(transaction=True)
class TestKeepUp:
    def test_makes_days_ahead_and_prunes(self):
        last = datetime.now(UTC).date() + timedelta(days=7)
        with database.connect("default") as own:
            own.execute(f"DROP TABLE {partitions.table_of(last)}")

        done = maintain("default")

        assert done.made == [last]
        assert done.pruned.rows["outbox_inbox"] == 0

    def test_forgets_silent_processes(self):
        Process.objects.create(kind="relay", host="h", pid=1, beat_at=datetime.now(UTC) - timedelta(minutes=6))

        assert maintain("default").forgotten == 1

    def test_refuses_a_database_without_tables(self):
        with database.connect("default") as own:
            own.execute("ALTER TABLE outbox_idle RENAME TO elsewhere")
            try:
                with pytest.raises(NotMigrated):
                    maintain("default")
            finally:
                own.execute("ALTER TABLE elsewhere RENAME TO outbox_idle")


class TestPruneBrokers:
    def test_calls_until_nothing_is_left(self, settings, monkeypatch):
        settings.OUTBOX = {"BROKERS": {"default": {"BACKEND": "outbox.brokers.memory.MemoryBroker"}}}
        left = [3, 2, 0]
        monkeypatch.setattr(MemoryBroker, "prune", lambda self: left.pop(0))

        assert prune_brokers(["default", "default"]) == {"default": 5}
        assert left == []
