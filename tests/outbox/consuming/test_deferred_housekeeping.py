from datetime import UTC, datetime, timedelta

import pytest

from outbox import consumer, database
from outbox.consuming import deferred_housekeeping
from outbox.consuming.deferred_housekeeping import tidy
from outbox.consuming.subscriptions import SEPARATOR
from outbox.database.heartbeats import beat
from outbox.models import Deferred, Inbox, OperatorAct, Process
from outbox.testing.factories import DeferredFactory, InboxFactory
from tests.factories import stored

pytestmark = pytest.mark.django_db(transaction=True)


def live(*subjects, group="points", started=timedelta()):
    """Let a consumer of a group live, with handlers for subjects of the topic orders."""
    subscriptions = [SEPARATOR.join(("orders", subject, "*")) for subject in subjects]
    beat(database.raw("default"), "consumer", consumer_group=group, subscriptions=subscriptions)
    Process.objects.update(started_at=datetime.now(UTC) - started)


def without_code(hours, **fields):
    return DeferredFactory(type="shop.Order", no_code_since=datetime.now(UTC) - timedelta(hours=hours), **fields)


class TestTidy:
    def test_deletes_messages_that_have_ended_otherwise(self):
        ended, other = DeferredFactory(dead=True), DeferredFactory(dead=True)
        InboxFactory(message_id=ended.message_id, idempotency_key="own key")
        InboxFactory(message_id=other.message_id, consumer_group="cart")

        tidy("default")

        assert Deferred.objects.get() == other

    def test_notes_since_when_no_live_process_has_a_handler(self):
        live("shop.Order", "topic bills")
        mine, foreign = DeferredFactory(type="shop.Order"), DeferredFactory(type="shop.Bill")
        later = DeferredFactory(type="shop.Bill", waiting=True)

        tidy("default")

        assert [stored(row).no_code_since is None for row in (mine, foreign, later)] == [True, False, True]

    def test_clears_that_where_one_has_a_handler_again(self):
        live("topic orders")
        row = without_code(1)

        tidy("default")

        assert stored(row).no_code_since is None

    def test_leaves_a_message_alone_that_is_being_run(self):
        row = DeferredFactory()
        InboxFactory(message_id=row.message_id)
        with database.connect("default") as other, other.transaction():
            other.execute("SELECT FROM outbox_deferred WHERE id = %s FOR UPDATE", [row.id])

            tidy("default")

        assert stored(row).no_code_since is None


class TestGivingUp:
    def test_makes_a_message_dead_after_nine_hours(self, dead_lettered):
        live("shop.Bill", started=timedelta(days=1))
        late, early = without_code(10), without_code(8)

        tidy("default")

        assert stored(late).dead_at
        assert stored(late).error == "no process of the group has a handler"
        [said] = dead_lettered
        assert (said["group"], said["message_id"], said["topic"]) == ("points", late.own_id, "orders")
        assert said["reason"] == "no process of the group has a handler"
        assert stored(early).dead_at is None

    @pytest.mark.parametrize("started", [None, timedelta(hours=1)])
    def test_counts_only_the_time_in_which_processes_live(self, started):
        if started:
            live("shop.Bill", started=started)
        row = without_code(60)

        tidy("default")

        assert stored(row).dead_at is None

    @pytest.mark.parametrize(("on_dead", "is_dead"), [("block", False), ("skip", True)])
    def test_lets_a_key_go_on_only_where_its_group_skips(self, on_dead, is_dead, settings):
        settings.OUTBOX = {"BROKERS": {"default": {}}, "TOPICS": {"orders": {"TYPE": "fifo"}}}
        consumer(topic="orders", group="points", on_dead=on_dead)(lambda message, context: None)
        live("shop.Bill", started=timedelta(days=1))
        row = without_code(10, order_key="points orders ada")

        tidy("default")

        assert bool(stored(row).dead_at) is is_dead


class TestDeadFor:
    def test_discards_older_dead_letters(self, settings):
        settings.OUTBOX = {**settings.OUTBOX, "CONSUMER": {"DEAD_FOR": timedelta(days=30)}}
        old = DeferredFactory(dead=True, dead_at=datetime.now(UTC) - timedelta(days=31))
        new = DeferredFactory(dead=True)

        tidy("default")

        assert Deferred.objects.get() == new
        assert (Inbox.objects.get().message_id, OperatorAct.objects.get().acted_by) == (old.message_id, "housekeeping")

    def test_is_counted_by_the_databases_clock(self, settings, monkeypatch):
        class NextYear(datetime):
            @classmethod
            def now(cls, tz=None):
                return datetime.now(tz) + timedelta(days=365)

        monkeypatch.setattr(deferred_housekeeping, "datetime", NextYear, raising=False)
        settings.OUTBOX = {**settings.OUTBOX, "CONSUMER": {"DEAD_FOR": timedelta(days=30)}}
        row = DeferredFactory(dead=True)

        tidy("default")

        assert Deferred.objects.get() == row

    def test_is_without_end_by_default(self):
        row = DeferredFactory(dead=True, dead_at=datetime.now(UTC) - timedelta(days=3000))

        tidy("default")

        assert Deferred.objects.get() == row
