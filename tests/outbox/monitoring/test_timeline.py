from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from outbox import database
from outbox.batches.operators import replay_messages
from outbox.embedded.models import EmbeddedHalf, EmbeddedMessage, EmbeddedTopic, HalfState
from outbox.ids import topic_number
from outbox.models import DeadMessage, Duplicate, FailedDelivery, FailedSend, Inbox, OperatorAct, State
from outbox.monitoring.timeline import Severity, read_timeline
from outbox.testing.factories import CheckBackFactory, DeferredFactory, FailedDeliveryFactory
from tests.factories import BatchFactory, DelayedFactory, MessageRowFactory, TicketFactory, TopicFactory

pytestmark = pytest.mark.django_db

START = datetime(2026, 1, 1, 12, tzinfo=UTC)


def at(seconds):
    return START + timedelta(seconds=seconds)


@pytest.fixture
def topic(db):
    return TopicFactory(name="told", type="transaction")


@pytest.fixture
def message(topic):
    return MessageRowFactory(topic=topic, created_at=at(0))


def moments(message):
    return [(moment.what, moment.who) for moment in read_timeline("default", message.id).entries]


def only(message, what, who=None):
    (moment,) = [one for one in read_timeline("default", message.id).entries if one.what == what and who in (None, one.who)]
    return moment


def embedded(model, message, **fields):
    """Store a message or a half message in the embedded broker."""
    topic = EmbeddedTopic.objects.create(id=topic_number("told"), name="told", type="transaction", queues=1)
    texts = {"message_id": str(message.id), "source": "s", "key": "", "tag": "", "headers": "{}"}
    return model.objects.create(topic_id=topic.id, queue=0, body=b"", **texts, **fields)


class TestReadTimeline:
    def test_knows_nothing_of_a_message_that_is_not_there(self):
        assert read_timeline("default", uuid4()) is None

    def test_begins_with_the_record(self, topic, message):
        TicketFactory(topic=topic, message=message)

        timeline = read_timeline("default", message.id)

        assert (timeline.state, timeline.topic, timeline.broker) == ("waiting", "told", "default")
        assert [(moment.at, moment.what) for moment in timeline.entries] == [(at(0), "Published")]

    def test_knows_when_a_delayed_message_is_due(self, topic, message):
        DelayedFactory(topic=topic, message=message, due_at=at(60))

        timeline = read_timeline("default", message.id)

        assert (timeline.state, timeline.due_at) == ("delayed", at(60))

    def test_tells_a_message_from_its_claim_to_its_commit(self, topic, message):
        fields = {"claimed_at": at(1), "decided_at": at(2), "sent_at": at(3), "half_ids": ["77"], "first_seq": 5, "lane": 2}
        BatchFactory(topic=topic, message_ids=[message.id], state=State.SENT, **fields)

        assert moments(message) == [
            (what, "") for what in ("Published", "Claimed", "Half message sent", "Commit decided", "Committed")
        ]
        assert "as number 5 of lane 2" in only(message, "Claimed").text
        assert "half message 77" in only(message, "Half message sent").text

    def test_says_sent_where_there_was_no_half_message(self, topic, message):
        BatchFactory(topic=topic, message_ids=[message.id], state=State.SENT, claimed_at=at(1), sent_at=at(3))

        assert only(message, "Sent").severity is Severity.GOOD

    def test_follows_a_message_through_the_batches_that_held_it(self, topic, message):
        other = MessageRowFactory(topic=topic)
        both = [other.id, message.id]
        left = BatchFactory(
            topic=topic, message_ids=both, split=[2], state=State.SENT, claimed_at=at(1), decided_at=at(2), sent_at=at(3)
        )
        taken = BatchFactory(topic=topic, message_ids=[message.id], first_seq=2, state=State.CLAIMED, attempt=2, claimed_at=at(4))
        FailedSend.objects.create(
            batch_id=left.id, attempt=1, message_ids=[message.id], verdict="unsure", reason="time-out", failed_at=at(2)
        )
        FailedSend.objects.create(
            batch_id=taken.id, attempt=1, message_ids=[other.id], verdict="refused", reason="none of mine", failed_at=at(5)
        )

        told = [(moment.what, moment.text) for moment in read_timeline("default", message.id).entries[1:]]

        assert told == [
            ("Claimed", f"in batch {left.id} as number 2 of lane 1"),
            ("Not sent: unsure", f"batch {left.id}, attempt 1: time-out"),
            ("Claimed", f"in batch {taken.id} as number 2 of lane 1; it is at attempt 2"),
        ]

    def test_says_when_a_message_is_claimed_again(self, topic, message):
        BatchFactory(
            topic=topic,
            message_ids=[message.id],
            state=State.RELEASED,
            failures=3,
            due_at=at(9),
            last_error="time-out",
            claimed_at=at(1),
        )

        moment = only(message, "Released")

        assert (moment.at, moment.text, moment.severity) == (
            at(9),
            "to be claimed again: time-out, after 3 failures",
            Severity.WAITING,
        )

    def test_tells_what_was_asked_and_answered(self, message):
        about = {"asked_by": "endpoint", "message_id": str(message.id), "half_id": "77"}
        CheckBackFactory(**about, answer="UNKNOWN", answered_at=at(1))
        CheckBackFactory(**about, asked=2, answer="COMMIT", reason="decided", answered_at=at(2))

        assert moments(message)[1:] == [("Check-back: UNKNOWN", "endpoint"), ("Check-back: COMMIT", "endpoint")]
        assert only(message, "Check-back: COMMIT").text == "check-back 2 about half message 77: decided"

    def test_tells_what_the_broker_was_sent_instead(self, message):
        CheckBackFactory(message_id=str(message.id), answer="COMMIT", sent_answer="ROLLBACK", answered_at=at(1))
        CheckBackFactory(message_id=str(message.id), answer="UNKNOWN", sent_answer="COMMIT", answered_at=at(2))

        assert moments(message)[1:] == [
            ("Check-back: COMMIT, sent as ROLLBACK: already visible", "broker"),
            ("Check-back: UNKNOWN, sent as COMMIT", "broker"),
        ]

    def test_tells_what_nobody_can_prove(self, message):
        batch = BatchFactory(message_ids=[message.id], state=State.DEAD, claimed_at=None)
        FailedSend.objects.create(
            batch_id=batch.id, attempt=1, message_ids=[message.id], verdict="unproven", reason="too old", failed_at=at(1)
        )

        assert only(message, "Not confirmed").text == f"batch {batch.id}, attempt 1: too old"

    def test_tells_what_each_group_did(self, message):
        shared = {"message_id": message.id, "topic": "told"}
        FailedDeliveryFactory(**shared, consumer_group="cart", error="KeyError: 1", traceback="File ...", failed_at=at(1))
        FailedDeliveryFactory(**shared, consumer_group="points", error="Reject", dead_letter=True, failed_at=at(2))
        Inbox.objects.create(consumer_group="cart", idempotency_key="1", delivery_count=2, handled_at=at(3), **shared)
        Duplicate.objects.create(consumer_group="cart", delivery_count=3, dropped_at=at(4), **shared)

        assert moments(message)[1:] == [
            ("Failed", "cart"),
            ("Failed", "points"),
            ("Handled", "cart"),
            ("Dropped as a duplicate", "cart"),
        ]
        assert only(message, "Failed", who="cart").traceback == "File ..."

    def test_says_that_a_group_has_deferred_it(self, message):
        about = {"message_id": message.id, "topic": "told", "deferred_at": at(1), "dead_at": at(2)}
        DeferredFactory(consumer_group="points", dead=True, **about)

        timeline = read_timeline("default", message.id)

        assert [(one.what, one.who, one.text) for one in timeline.entries[1:]] == [
            ("Deferred", "points", "failed"),
            ("Dead letter", "points", "ValueError: no such customer"),
        ]
        assert timeline.ended == [("points", "dead letter", "")]

    def test_says_who_replayed_held_and_discarded_it_for_a_group(self, message):
        shared = {"consumer_group": "points", "message_id": message.id, "topic": "told"}
        for second, act in enumerate(["replayed", "retried now", "held", "discarded"], start=2):
            OperatorAct.objects.create(act=act, acted_at=at(second), acted_by="ada", reason="a test order", **shared)
        Inbox.objects.create(idempotency_key="1", delivery_count=0, handled_at=at(5), **shared)

        timeline = read_timeline("default", message.id)

        assert [(one.what, one.who, one.by) for one in timeline.entries[1:]] == [
            ("Replayed", "points", "ada"),
            ("Retried now", "points", "ada"),
            ("Held", "points", "ada"),
            ("Discarded", "points", "ada"),
        ]
        assert only(message, "Discarded").text == "a test order"
        assert timeline.ended == [("points", "discarded", "ada")]

    def test_says_who_sent_it_again_and_who_discarded_it(self, topic, message):
        batch = BatchFactory(topic=topic, message_ids=[message.id], state=State.DEAD)
        replay_messages(database.raw("default"), [message.id], by="ada", reason="the disk is larger")
        batch.refresh_from_db()
        batch.state = State.DEAD
        batch.save()
        replay_messages(database.raw("default"), [message.id], by="bea", discard=True)

        acts = [one for one in read_timeline("default", message.id).entries if one.by]

        assert [(one.what, one.by, one.text) for one in acts] == [
            ("Replayed", "ada", "the disk is larger"),
            ("Discarded", "bea", ""),
        ]

    def test_tells_what_was_handled_from_what_no_handler_wanted(self, message):
        shared = {"message_id": message.id, "topic": "told"}
        Inbox.objects.create(consumer_group="cart", idempotency_key="1", delivery_count=1, handled_at=at(1), **shared)
        Inbox.objects.create(consumer_group="points", idempotency_key="1", delivery_count=0, handled_at=at(2), **shared)

        assert moments(message)[1:] == [("Handled", "cart"), ("Ignored", "points")]

    def test_tells_why_a_message_was_given_up(self, message):
        DeadMessage.objects.create(message_id=message.id, batch_id=1, topic="told", reason="too large", died_at=at(1))

        assert only(message, "Dead").text == "too large"

    def test_tells_what_the_embedded_broker_made_visible(self, message):
        embedded(EmbeddedMessage, message, pos=1, stored_at=at(1))

        assert moments(message)[1:] == [("Delivered", "broker")]

    def test_tells_of_a_half_that_was_asked_about_and_rolled_back(self, message):
        times = {"born_at": at(1), "ask_at": at(2), "ended_at": at(4)}
        embedded(EmbeddedHalf, message, id=77, token="", state=HalfState.ROLLED_BACK, asked=1, **times)
        CheckBackFactory(message_id=str(message.id), half_id="77", answer="ROLLBACK", reason="released", answered_at=at(3))

        assert [what for what, _ in moments(message)[1:]] == [
            "Half message stored",
            "Check-back: ROLLBACK",
            "Half message rolled back",
        ]

    def test_keeps_to_the_newest_of_a_thousand_failures(self, message):
        FailedDelivery.objects.bulk_create(
            FailedDeliveryFactory.build(message_id=message.id, delivery_count=count, failed_at=at(count)) for count in range(1000)
        )

        told = read_timeline("default", message.id).entries[1:]

        assert [moment.at for moment in told] == [at(delivery_count) for delivery_count in range(950, 1000)]
