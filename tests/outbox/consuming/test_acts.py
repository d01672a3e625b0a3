from datetime import UTC, datetime, timedelta

import pytest

from outbox import database
from outbox.consuming.acts import STATES, DeferredState, read_group_states, settle
from outbox.consuming.deferred import HELD
from outbox.database.heartbeats import Handling, beat
from outbox.database.locks import Lock
from outbox.models import Act, Deferred, Inbox, OperatorAct
from outbox.testing.factories import DeferredFactory
from tests.factories import stored

pytestmark = pytest.mark.django_db(transaction=True)

KEY = "points orders ada"
LOCK_MESSAGE = f"SELECT pg_advisory_xact_lock({Lock.INBOX}, hashtext(%s || ' ' || %s))"


def act_on(act, *rows, **options):
    """Do an act about rows; return the rows about which it was done."""
    chosen = Deferred.objects.filter(id__in=[row.id for row in rows])
    return [row.id for portion in settle(chosen, act, by="ada", reason="corrected", **options) for row in portion]


def is_due(row):
    return row.dead_at is None and row.due_at is not None and row.due_at <= datetime.now(UTC)


class TestReplay:
    def test_makes_a_dead_letter_due_with_failures_from_zero(self):
        row = DeferredFactory(dead=True, failures=5, crashes=1, runs=7)

        assert act_on(Act.REPLAYED, row) == [row.id]

        again = stored(row)
        assert is_due(again)
        assert (again.failures, again.crashes, again.runs) == (0, 0, 8)

    def test_leaves_messages_alone_that_wait(self):
        row = DeferredFactory(waiting=True)

        assert act_on(Act.REPLAYED, row) == []
        assert stored(row).due_at == row.due_at

    def test_writes_down_who_did_it_and_why(self):
        row = DeferredFactory(dead=True, delivery_count=2, runs=3)

        act_on(Act.REPLAYED, row)

        act = OperatorAct.objects.get()
        assert (act.act, act.message_id, act.consumer_group, act.topic) == ("replayed", row.message_id, "points", "orders")
        assert (act.acted_by, act.reason, act.delivery_count, act.fingerprint) == ("ada", "corrected", 5, row.fingerprint)

    def test_is_done_in_portions_and_up_to_a_limit(self, monkeypatch):
        monkeypatch.setattr("outbox.consuming.acts.PORTION", 2)
        rows = DeferredFactory.create_batch(5, dead=True)

        assert [len(portion) for portion in settle(Deferred.objects.all(), Act.REPLAYED, by="ada", limit=3)] == [2, 1]
        assert [is_due(stored(row)) for row in rows] == [True, True, True, False, False]


class TestRetryNow:
    @pytest.mark.parametrize("state", ["waiting", "held"])
    def test_makes_a_message_due_that_waits_or_is_held(self, state):
        row = DeferredFactory(**{state: True})

        assert act_on(Act.RETRIED_NOW, row) == [row.id]
        assert is_due(stored(row))

    def test_leaves_messages_alone_that_are_asleep_or_dead(self):
        rows = [DeferredFactory(asleep=True, order_key=KEY), DeferredFactory(dead=True)]
        DeferredFactory(order_key="other")

        assert act_on(Act.RETRIED_NOW, *rows) == []

    def test_gives_a_message_without_code_its_time_again(self):
        row = DeferredFactory(no_code_since=datetime.now(UTC) - timedelta(hours=8))

        act_on(Act.RETRIED_NOW, row)

        assert stored(row).no_code_since is None


class TestHold:
    @pytest.mark.parametrize("state", [{}, {"waiting": True}, {"asleep": True}])
    def test_keeps_a_message_from_being_run(self, state):
        row = DeferredFactory(**state)

        assert act_on(Act.HELD, row) == [row.id]
        assert stored(row).due_at == HELD
        assert act_on(Act.HELD, row) == []

    def test_leaves_a_message_alone_that_is_being_run(self):
        row = DeferredFactory()
        with database.connect("default") as other, other.transaction():
            other.execute("SELECT FROM outbox_deferred WHERE id = %s FOR UPDATE", [row.id])

            assert act_on(Act.HELD, row) == []


class TestDiscard:
    @pytest.mark.parametrize("state", ["waiting", "dead"])
    def test_ends_a_message_so_that_a_late_delivery_is_known(self, state):
        row = DeferredFactory(**{state: True}, source="urn:uuid:1", lane=3, number=17)

        assert act_on(Act.DISCARDED, row) == [row.id]

        inbox = Inbox.objects.get(consumer_group="points", idempotency_key=row.idempotency_key)
        assert (inbox.message_id, inbox.source, inbox.lane, inbox.number) == (row.message_id, "urn:uuid:1", 3, 17)
        assert inbox.delivery_count == 0
        assert not Deferred.objects.exists()
        assert OperatorAct.objects.get().act == "discarded"

    def test_leaves_a_message_alone_that_a_handler_is_at_work_on(self):
        row, free = DeferredFactory(), DeferredFactory()
        with database.connect("default") as other, other.transaction():
            other.execute(LOCK_MESSAGE, ["points", row.idempotency_key])

            assert act_on(Act.DISCARDED, row, free) == [free.id]
        assert Deferred.objects.get() == row

    def test_keeps_the_row_of_a_message_that_was_handled_beside_it(self):
        row = DeferredFactory(dead=True)
        Inbox.objects.create(
            consumer_group="points",
            idempotency_key=row.idempotency_key,
            message_id=row.message_id,
            topic="orders",
            delivery_count=2,
        )

        act_on(Act.DISCARDED, row)

        assert Inbox.objects.get().delivery_count == 2

    def test_wakes_the_next_message_of_the_key(self):
        first, second, third = (DeferredFactory(order_key=KEY, asleep=asleep) for asleep in (False, True, True))

        act_on(Act.DISCARDED, first)

        assert is_due(stored(second))
        assert stored(third).due_at is None


class TestStates:
    def test_are_those_of_the_columns(self):
        beat(database.raw("default"), "consumer", consumer_group="points", handling=Handling("orders", "run", "add_points", 1.0))
        rows = {
            "due": DeferredFactory(),
            "waiting": DeferredFactory(waiting=True),
            "asleep": DeferredFactory(asleep=True),
            "held": DeferredFactory(held=True),
            "dead": DeferredFactory(dead=True),
            "in doubt": DeferredFactory(waiting=True, crashes=1),
            "running": DeferredFactory(waiting=True, own_id="run"),
            "no handler": DeferredFactory(waiting=True, no_code_since=datetime(2026, 1, 1, tzinfo=UTC)),
        }
        DeferredFactory(dead=True, no_code_since=datetime(2026, 1, 1, tzinfo=UTC))

        def ids(state):
            return {row.id for row in Deferred.objects.filter(STATES[DeferredState(state)])}

        for state in ("due", "asleep", "held", "in doubt", "running", "no handler"):
            assert ids(state) == {rows[state].id}
        assert rows["dead"].id in ids("dead")
        assert ids("waiting") == {rows[state].id for state in ("waiting", "in doubt", "running", "no handler")}


class TestReadEnds:
    def test_names_the_groups_that_know_and_have_not_handled_a_message(self):
        dead = DeferredFactory(dead=True)
        DeferredFactory(consumer_group="cart", message_id=dead.message_id)
        gone = DeferredFactory()
        act_on(Act.DISCARDED, gone)

        states = read_group_states([dead.message_id, gone.message_id], "default")

        assert states == {
            dead.message_id: [("cart", "deferred", ""), ("points", "dead letter", "")],
            gone.message_id: [("points", "discarded", "ada")],
        }
