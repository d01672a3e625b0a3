"""Open commits after an outage: of thousands of batches of one message, or of a few large batches."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from outbox import database
from outbox.brokers.base import Ended, EndSemantics, Outgoing
from outbox.message import Header
from outbox.models import Batch, State
from outbox.relay import commit as commit_module
from tests.factories import message_id
from tests.outbox.relay.committing import ended

pytestmark = pytest.mark.django_db

WINDOW = timedelta(seconds=2)


LEAVE_OPEN = """
INSERT INTO outbox_batch (topic_id, message_ids, half_ids, state, decided_at, ends_until) VALUES (%s, %s, %s, %s, %s, %s)
"""


class TestAnOutage:
    """Open commits of thousands of batches are settled in a few sweeps."""

    @pytest.fixture(params=[EndSemantics.IDEMPOTENT, EndSemantics.STATELESS])
    def broker(self, make_broker, request):
        return make_broker(request.param, window=WINDOW)

    @pytest.fixture
    def leave_open(self, broker, make_topic):
        """Store PREPARED batches of so many messages, with their half messages."""

        def leave_open(*sizes: int) -> None:
            topic, long_ago = make_topic("transaction"), datetime.now(UTC) - timedelta(hours=1)
            (source,) = database.raw("default").execute("SELECT id FROM outbox_source").fetchone()
            for size in sizes:
                ids: list[UUID] = [message_id() for _ in range(size)]
                headers = {Header.SOURCE: source}
                stored_halves = broker.send_halves([Outgoing(str(one), topic.name, b"{}", headers=headers) for one in ids])
                half_ids = [half.half_id for half in stored_halves]
                rows = [topic.id, ids, half_ids, State.PREPARED, long_ago, long_ago]
                database.raw("default").execute(LEAVE_OPEN, rows)

        return leave_open

    def test_of_3000_batches_of_one_is_settled(self, relay, broker, leave_open, ends):
        leave_open(*[1] * 3000)
        looks = 0
        while relay.sweep().batches:
            looks += 1

        assert looks <= 10
        assert [size for size, _ in ends] == [500] * 6
        assert Batch.objects.filter(state=State.SENT).count() == 3000
        assert set(ended(broker)) == {Ended.COMMITTED}

    def test_of_batches_of_500_is_settled(self, relay, broker, leave_open):
        leave_open(*[500] * 6)

        relay.sweep()

        assert Batch.objects.filter(state=State.SENT).count() == 6
        assert len(broker.visible(broker.halves()[0].message.topic)) == 3000

    def test_is_taken_up_by_so_many_messages_at_once(self, relay, leave_open, monkeypatch, ends):
        monkeypatch.setattr(commit_module, "PAGE_LIMIT", {"batches": 500, "messages": 5})
        leave_open(4, 3, 1, 9)

        relay.sweep()

        assert [size for size, _ in ends] == [7, 10]
