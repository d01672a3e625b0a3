"""The state after a fault, and the steps of recovery: expired leases and check-backs."""

from datetime import UTC, datetime, timedelta

from outbox import database
from outbox.brokers.memory import MemoryBroker
from outbox.check_backs.ask import in_process
from outbox.models import Batch, State


def copies(broker: MemoryBroker, messages: list[str]) -> list[int]:
    return [broker.copies(message) for message in messages]


def end_leases() -> None:
    Batch.objects.filter(state=State.CLAIMED).update(lease_until=datetime.now(UTC) - timedelta(seconds=1))


def ask_about_halves(broker: MemoryBroker) -> None:
    """Check back about each half message that is not ended, and end it as answered."""
    for half in broker.halves():
        half.due_at = datetime.now(UTC)
    broker.check_halves(in_process("default"))


def is_free(lane: int) -> bool:
    """Return whether no relay holds a lane."""
    row = database.raw("default").execute(
        "SELECT FROM pg_locks WHERE locktype = 'advisory' AND classid = 7707 AND objid = %s"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
        [lane],
    )
    return row.fetchone() is None
