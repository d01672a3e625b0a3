from datetime import timedelta

import pytest
from django.utils import timezone

from outbox import database
from outbox.consuming.outcome import Outcome
from outbox.models import Act, FailedDelivery, Gap, Inbox, OperatorAct, State
from outbox.monitoring import quick_check
from outbox.monitoring.quick_check import read_progress
from tests.factories import BatchFactory, DelayedFactory, MessageRowFactory, TicketFactory, message_id

pytestmark = pytest.mark.django_db

HOUR = timedelta(hours=1)
SECOND = timedelta(seconds=1)


@pytest.fixture
def published(orders):
    """Store a message that was published so many seconds ago."""

    def published(seconds=60.0):
        at = timezone.now() - seconds * SECOND
        return MessageRowFactory(topic=orders, id=message_id(at), created_at=at)

    return published


@pytest.fixture
def sent(published, orders):
    """Store messages that were sent two seconds after publishing, in one batch."""

    def sent(count=1, seconds=60.0):
        rows = [published(seconds) for _ in range(count)]
        at = rows[0].created_at + 2 * SECOND
        BatchFactory(topic=orders, message_ids=[row.id for row in rows], state=State.SENT, sent_at=at)
        return rows

    return sent


def handled(row, group="cart", after=5.0):
    at = row.created_at + after * SECOND
    Inbox.objects.create(consumer_group=group, dedupe_key=str(row.id), message_id=row.id, topic="orders", handled_at=at)


def failed(row, outcome, group="cart"):
    FailedDelivery.objects.create(
        consumer_group=group, message_id=row.id, topic="orders", delivery_count=1, outcome=outcome, fingerprint="", error=""
    )


def acted(row, act, group="cart"):
    OperatorAct.objects.create(act=act, consumer_group=group, message_id=row.id, topic="orders", acted_by="ada")


def progress(group="", length=HOUR, end=None):
    now = timezone.now()
    found = read_progress(database.raw("default"), "default", now=now, begin=now - length, end=end)
    return next((one for one in found if (one.topic, one.consumer_group) == ("orders", group)), None)


class TestTheWayToTheBroker:
    def test_is_counted_message_by_message(self, sent, published, orders):
        sent(3)
        TicketFactory(message=published())
        DelayedFactory(message=published())
        BatchFactory(topic=orders, message_ids=[published().id], state=State.CLAIMED)
        BatchFactory(topic=orders, message_ids=[published().id, published().id], state=State.DEAD)

        found = progress()

        assert (found.messages, found.done, found.under_way, found.given_up, found.missing) == (8, 3, 3, 2, 0)

    def test_takes_a_message_where_it_was_split_to(self, published, orders):
        first, second = published(), published()
        BatchFactory(topic=orders, message_ids=[first.id, second.id], state=State.SENT, split=[2], sent_at=timezone.now())
        BatchFactory(topic=orders, message_ids=[second.id], state=State.DEAD)

        found = progress()

        assert (found.messages, found.done, found.given_up) == (2, 1, 1)

    def test_begins_anew_for_a_message_that_was_split_off_and_waits(self, published, orders):
        first, second = published(), published()
        BatchFactory(topic=orders, message_ids=[first.id, second.id], state=State.SENT, split=[2], sent_at=timezone.now())
        TicketFactory(message=second)

        found = progress()

        assert (found.done, found.under_way) == (1, 1)

    def test_misses_a_message_that_nothing_would_send(self, sent, published):
        sent()
        published()

        assert progress().missing == 1

    def test_is_that_of_a_time(self, sent):
        sent(2, seconds=3000)
        sent(1, seconds=60)

        assert progress(end=timezone.now() - 1500 * SECOND).messages == 2

    def test_took_as_long_as_the_slowest_did(self, sent):
        sent(3)

        assert progress().seconds == pytest.approx([2, 2, 2], abs=0.5)

    def test_is_looked_at_within_the_window_only(self, sent):
        sent(2, seconds=7200)
        sent(1)

        assert progress().messages == 1
        assert progress(length=3 * HOUR).messages == 3

    def test_is_looked_at_no_further_back_than_rows_are_kept(self, sent, settings):
        settings.OUTBOX = {**settings.OUTBOX, "RETENTION": HOUR}
        sent(2, seconds=7200)
        sent(1)

        assert progress(length=24 * HOUR).messages == 1

    def test_is_looked_at_for_the_newest_messages_only(self, sent, published, monkeypatch):
        monkeypatch.setattr(quick_check, "MESSAGE_LIMIT", 2)
        sent(2, seconds=120)
        TicketFactory(message=published(seconds=60))

        assert (progress().messages, progress().done) == (2, 1)

    def test_is_empty_where_nothing_was_published(self):
        assert progress() is None


class TestTheWayThroughAGroup:
    def test_is_counted_of_what_was_sent(self, sent, published):
        rows = sent(4)
        TicketFactory(message=published())
        handled(rows[0])
        handled(rows[1], after=9.0)
        failed(rows[2], Outcome.DEAD_LETTER)
        failed(rows[3], Outcome.DEFERRED)

        found = progress("cart")

        assert (found.messages, found.done, found.under_way, found.given_up, found.missing) == (4, 2, 1, 1, 0)
        assert found.seconds == pytest.approx([5, 9, 9], abs=0.01)
        assert progress("points").under_way == 4

    @pytest.mark.parametrize("act", [Act.DISCARD_ASKED, Act.DISCARDED])
    def test_ends_where_an_operator_discarded_the_message(self, sent, act):
        (row,) = sent()
        failed(row, Outcome.DEAD_LETTER)
        acted(row, act)

        assert progress("cart").given_up == 1

    def test_goes_on_where_a_dead_letter_was_replayed(self, sent):
        (row,) = sent()
        failed(row, Outcome.DEAD_LETTER)
        acted(row, Act.REPLAYED)

        assert (progress("cart").given_up, progress("cart").under_way) == (0, 1)

        handled(row)

        assert progress("cart").done == 1

    def test_is_done_where_the_broker_handed_out_a_dead_letter_after_all(self, sent):
        (row,) = sent()
        failed(row, Outcome.DEAD_LETTER)
        handled(row)

        assert (progress("cart").done, progress("cart").given_up, progress("cart").under_way) == (1, 0, 0)

    def test_misses_the_numbers_of_open_gaps(self, sent):
        sent()
        about = {"consumer_group": "cart", "source": "us", "topic": "orders", "lane": 1}
        Gap.objects.create(**about, first_number=3, last_number=5)
        Gap.objects.create(**about, first_number=9, last_number=9)
        Gap.objects.create(**about, first_number=20, last_number=29, closed_at=timezone.now())

        assert (progress("cart").missing, progress("points").missing) == (4, 0)

    def test_is_left_out_where_its_inbox_is_in_another_database(self, sent):
        sent()

        found = read_progress(database.raw("default"), "other", now=timezone.now(), begin=timezone.now() - HOUR)

        assert {one.consumer_group for one in found} == {""}
