"""Pruning, on days that are far from today."""

from datetime import UTC, date, datetime, time, timedelta

import pytest
from django.db import connection as django_connection

from outbox import database
from outbox.database import partitions
from outbox.database.locks import Lock
from outbox.errors import ConfigurationError
from outbox.extensions import Extension, RetentionHold
from outbox.models import (
    Batch,
    DeadMessage,
    Duplicate,
    FailedSend,
    Gap,
    IdempotencyKey,
    Inbox,
    MessageRow,
    OperatorAct,
    State,
    Topic,
)
from outbox.relay.maintenance import Pruned, prune
from outbox.testing.factories import CheckBackFactory, FailedDeliveryFactory, InboxFactory
from tests.factories import BatchFactory, DelayedFactory, MessageRowFactory, TicketFactory, TopicFactory, message_id

pytestmark = pytest.mark.django_db(transaction=True)

OLD = date(2001, 2, 3)
NOW = datetime(2001, 2, 20, 12, tzinfo=UTC)  # with the retention of 7 days, the 13th is the first day that is kept
LONG_AGO = datetime(2001, 2, 3, 12, tzinfo=UTC)
BRIEFLY = timedelta(milliseconds=150)
DAY = timedelta(days=1)


@pytest.fixture(autouse=True)
def _old_days():
    with database.connect("default") as own:
        for number in (3, 4, 12, 13):
            partitions.create_partition(own, date(2001, 2, number))
    yield
    with database.connect("default") as own, django_connection.cursor() as cursor:
        for day in partitions.days(own):
            if day.year < 2020:
                cursor.execute(f"DROP TABLE {partitions.table_of(day)}")


def days():
    with database.connect("default") as own:
        return [day.day for day in partitions.days(own) if day.year < 2020]


def message_of(day=OLD, **fields):
    return MessageRowFactory(id=message_id(datetime.combine(day, time(12), tzinfo=UTC)), **fields)


def batch_of(day=OLD, *, size=1, **fields):
    topic = TopicFactory()
    ids = [message_of(day, topic=topic).id for _ in range(size)]
    moment = datetime.combine(day, time(13), tzinfo=UTC)
    sent = {"sent_at": moment} if fields["state"] == State.SENT else {}
    return BatchFactory(topic=topic, message_ids=ids, claimed_at=moment, **sent, **fields)


class TestDays:
    def test_are_dropped_when_all_of_them_is_past_the_retention(self):
        pruned = prune("default", now=NOW)

        assert [day.day for day in pruned.days] == [3, 4, 12]
        assert days() == [13]

    def test_take_their_messages_with_them(self):
        old, young = message_of(OLD), message_of(date(2001, 2, 13))

        prune("default", now=NOW)

        assert list(MessageRow.objects.filter(id__in=[old.id, young.id])) == [young]

    @pytest.mark.parametrize(
        ("hold", "holder"),
        [
            (lambda: TicketFactory(message=message_of()), "waiting messages"),
            (lambda: DelayedFactory(message=message_of()), "delayed messages"),
            (lambda: batch_of(state=State.RELEASED), "unfinished batches"),
            (lambda: batch_of(state=State.CLAIMED), "unfinished batches"),
            (lambda: batch_of(state=State.PREPARED, half_ids=["1"]), "unfinished batches"),
            (lambda: batch_of(state=State.DEAD), "dead messages without a copy"),
        ],
        ids=["ticket", "delayed", "released", "claimed", "prepared", "dead"],
    )
    def test_are_kept_while_something_unfinished_points_into_them(self, hold, holder):
        hold()

        pruned = prune("default", now=NOW)

        assert pruned.kept == {OLD: holder}
        assert days() == [3, 13]

    @pytest.mark.parametrize("state", [State.SENT, State.DISCARDED])
    def test_are_dropped_when_their_batches_are_done(self, state):
        batch_of(state=state)

        assert OLD in prune("default", now=NOW).days

    def test_are_dropped_with_the_tombstones_of_what_never_committed(self):
        tombstone = message_of(topic_id=0, body=b"")

        assert OLD in prune("default", now=NOW).days

        assert not MessageRow.objects.filter(id=tombstone.id).exists()

    def test_are_dropped_when_their_dead_messages_are_copied(self):
        batch = batch_of(state=State.DEAD)
        DeadMessage.objects.create(
            message_id=batch.message_ids[0], batch_id=batch.id, topic="t", body=b"x", reason="refused", died_at=LONG_AGO
        )

        assert OLD in prune("default", now=NOW).days

        assert DeadMessage.objects.get().body == b"x"
        assert Batch.objects.get().state == State.DEAD

    def test_are_kept_when_the_copy_of_a_dead_message_has_no_body(self):
        batch = batch_of(state=State.DEAD)
        DeadMessage.objects.create(message_id=batch.message_ids[0], batch_id=batch.id, topic="t", reason="refused")

        assert OLD in prune("default", now=NOW).kept

    def test_are_dropped_when_a_dead_message_has_left_its_batch(self):
        batch_of(state=State.DEAD, size=1, split=[1])

        assert OLD in prune("default", now=NOW).days

    def test_wait_for_an_open_transaction_that_writes_into_them(self, monkeypatch):
        with database.connect("default") as publisher, publisher.transaction(), monkeypatch.context() as patch:
            patch.setattr(partitions, "PATIENCE", BRIEFLY)
            publisher.execute(
                "INSERT INTO outbox_message (id, topic_id, body) VALUES (%s, 0, '')",
                [message_id(datetime(2001, 2, 3, 12, tzinfo=UTC))],
            )

            pruned = prune("default", now=NOW)

            assert pruned.kept[OLD] == "open transactions"

        assert OLD in prune("default", now=NOW).days

    def test_are_looked_at_again_under_the_lock(self, connect):
        publisher = connect()
        message = message_of()
        held = []

        def hold():
            if not held:
                held.append(True)
                publisher.execute("INSERT INTO outbox_ticket (message_id, topic_id) VALUES (%s, 1)", [message.id])
                return False
            return True

        with database.connect("default") as own:
            hold()
            dropped = partitions.drop_partition(own, OLD, unless=hold)

        assert not dropped
        assert 3 in days()


class TestAlert:
    def test_is_raised_for_days_that_something_holds(self, alerts):
        TicketFactory(message=message_of())

        prune("default", now=NOW)

        assert len(alerts) == 1
        assert "2001-02-03 (waiting messages" in alerts[0]["reason"]

    def test_is_not_raised_for_days_that_only_could_not_be_locked(self, alerts, monkeypatch):
        with database.connect("default") as publisher, publisher.transaction():
            publisher.execute("INSERT INTO outbox_message (id, topic_id, body) VALUES (%s, 0, '')", [message_id()])

            monkeypatch.setattr(partitions, "PATIENCE", timedelta(0))
            pruned = prune("default", now=NOW)

        assert pruned.kept
        assert alerts == []


class TestBatches:
    def test_that_are_done_go_with_their_messages(self):
        sent, discarded = batch_of(state=State.SENT), batch_of(state=State.DISCARDED)
        young = batch_of(date(2001, 2, 13), state=State.SENT)

        pruned = prune("default", now=NOW)

        assert pruned.rows["outbox_batch"] == 2
        assert list(Batch.objects.all()) == [young]
        assert not Batch.objects.filter(id__in=[sent.id, discarded.id]).exists()

    def test_stay_while_they_are_not_done(self):
        for state in (State.RELEASED, State.CLAIMED, State.DEAD):
            batch_of(state=state)

        prune("default", now=NOW)

        assert Batch.objects.count() == 3

    def test_stay_while_another_message_keeps_their_day(self):
        sent = batch_of(state=State.SENT)
        batch_of(state=State.RELEASED)

        prune("default", now=NOW)

        assert Batch.objects.filter(id=sent.id).exists()

    def test_are_deleted_slice_by_slice(self, monkeypatch):
        monkeypatch.setattr("outbox.relay.maintenance.SLICE", 2)
        for state in (State.SENT, State.DEAD, State.SENT, State.SENT, State.SENT):
            batch_of(state=state, split=[1] if state == State.DEAD else [])

        assert prune("default", now=NOW).rows["outbox_batch"] == 4


class TestBooks:
    def test_lose_what_is_past_its_time(self):
        for moment in (LONG_AGO, NOW):
            self.write_books(moment)

        pruned = prune("default", now=NOW)

        assert {table: count for table, count in pruned.rows.items() if count} == dict.fromkeys(
            [
                *("outbox_inbox", "outbox_failed_delivery", "outbox_duplicate", "outbox_check_back", "outbox_failed_send"),
                *("outbox_operator_act", "outbox_gap", "outbox_idempotency_key", "outbox_dead"),
            ],
            1,
        )

    def test_keep_gaps_that_are_open(self):
        Gap.objects.create(consumer_group="g", source="s", topic="t", lane=1, first_number=1, last_number=2, found_at=LONG_AGO)

        prune("default", now=NOW)

        assert Gap.objects.exists()

    def test_lose_the_other_rows_while_a_publisher_takes_an_expired_idempotency_key(self, connect, monkeypatch):
        monkeypatch.setattr("outbox.relay.maintenance.SESSION_LIMIT", BRIEFLY)
        self.write_books(LONG_AGO)
        self.write_books(LONG_AGO + DAY)
        publisher = connect()
        with publisher.transaction():
            publisher.execute("UPDATE outbox_idempotency_key SET message_id = message_id WHERE expires_at < %s", [LONG_AGO + DAY])

            pruned = prune("default", now=NOW)

        assert (pruned.rows["outbox_idempotency_key"], pruned.rows["outbox_dead"]) == (1, 2)

    def test_are_deleted_slice_by_slice(self, monkeypatch):
        monkeypatch.setattr("outbox.relay.maintenance.SLICE", 2)
        for _ in range(5):
            Duplicate.objects.create(
                consumer_group="g", message_id=message_id(), topic="t", delivery_count=2, dropped_at=LONG_AGO
            )

        assert prune("default", now=NOW).rows["outbox_duplicate"] == 5

    def write_books(self, moment):
        key = moment.isoformat()
        about = {"consumer_group": "g", "message_id": message_id(), "topic": "t"}
        InboxFactory(**about, idempotency_key=key, handled_at=moment)
        FailedDeliveryFactory(**about, failed_at=moment)
        Duplicate.objects.create(**about, delivery_count=2, dropped_at=moment)
        CheckBackFactory(request_id=key, answered_at=moment)
        FailedSend.objects.create(batch_id=1, attempt=1, message_ids=[], verdict="unsure", reason="r", failed_at=moment)
        OperatorAct.objects.create(**about, act="replayed", reason="r", acted_by="ada", acted_at=moment)
        Gap.objects.create(
            consumer_group="g", source="s", topic="t", lane=1, first_number=moment.day, last_number=99, closed_at=moment
        )
        IdempotencyKey.objects.create(
            topic_id=1, idempotency_key=key, message_id=message_id(), expires_at=moment + timedelta(hours=1)
        )
        DeadMessage.objects.create(message_id=message_id(), batch_id=1, topic="t", body=b"", reason="r", died_at=moment)


class TestPrune:
    def test_goes_by_the_clock_of_the_database(self, monkeypatch):
        class Ahead(datetime):
            @classmethod
            def now(cls, tz=None):
                return datetime.now(tz) + timedelta(days=30)

        monkeypatch.setattr("outbox.relay.maintenance.datetime", Ahead)
        handled = InboxFactory()

        prune("default")

        assert Inbox.objects.filter(pk=handled.pk).exists()

    def test_is_done_by_one_at_a_time(self, connect):
        connect().execute(f"SELECT pg_advisory_lock({Lock.PRUNE}, 0)")

        assert prune("default", now=NOW) == Pruned()
        assert 3 in days()

    def test_leaves_topics_alone(self):
        topic = TopicFactory()

        prune("default", now=NOW)

        assert Topic.objects.filter(id=topic.id).exists()


@pytest.fixture
def extend(monkeypatch):
    """Return a function that adds an extension with these attributes."""

    def extend(**attributes):
        extension = type("AnExtension", (Extension,), attributes)()
        monkeypatch.setattr("outbox.relay.maintenance.extensions", lambda: [extension])

    return extend


class TestATableOfAnApp:
    @pytest.fixture
    def table(self):
        with database.connect("default") as own:
            own.execute("CREATE TABLE outbox_test_book (written_at timestamptz)")
            own.execute("INSERT INTO outbox_test_book VALUES (%s), (%s), (%s)", [LONG_AGO, LONG_AGO, NOW])
        yield "outbox_test_book"
        with database.connect("default") as own:
            own.execute("DROP TABLE outbox_test_book")

    def test_loses_what_is_past_its_time(self, table, extend):
        extend(tables={table: "written_at < %(before)s"})

        pruned = prune("default", now=NOW)

        assert pruned.rows[table] == 2

    def test_is_skipped_in_a_database_that_lacks_it(self, extend):
        extend(tables={"outbox_nowhere": "written_at < %(before)s"})

        pruned = prune("default", now=NOW)

        assert "outbox_nowhere" not in pruned.rows


class TestWithAHold:
    """An app deletes days itself, and the inbox with them."""

    retention: timedelta | None = None  # None: it holds nothing

    @pytest.fixture(autouse=True)
    def hold(self, monkeypatch, extend):
        monkeypatch.setattr(TestWithAHold, "retention", timedelta(days=7))
        inbox = frozenset({"outbox_inbox"})
        extend(retention_hold=RetentionHold("not copied yet", lambda: TestWithAHold.retention, timedelta(days=2), inbox))

    def test_days_are_left_to_it(self):
        pruned = prune("default", now=NOW)

        assert pruned.days == []
        assert pruned.kept == {date(2001, 2, day): "not copied yet" for day in (3, 4, 12)}

    def test_what_is_unfinished_in_a_day_is_named_first(self):
        TicketFactory(message=message_of())

        assert prune("default", now=NOW).kept[OLD] == "waiting messages"

    def test_batches_stay_that_were_sent_before_the_day_of_their_message_by_another_clock(self):
        before = datetime(2001, 2, 12, 23, 59, 59, tzinfo=UTC)
        young = message_of(date(2001, 2, 13))
        batch = BatchFactory(message_ids=[young.id], state=State.SENT, claimed_at=before, sent_at=before)

        prune("default", now=NOW)

        assert Batch.objects.filter(id=batch.id).exists()

    def test_batches_stay_as_long_as_their_day(self):
        batch = batch_of(state=State.SENT)

        prune("default", now=NOW)

        assert Batch.objects.filter(id=batch.id).exists()

    def test_the_tables_that_it_takes_along_are_its(self):
        TestBooks().write_books(LONG_AGO)

        pruned = prune("default", now=NOW)

        assert "outbox_inbox" not in pruned.rows
        assert Inbox.objects.exists()
        assert pruned.rows["outbox_duplicate"] == 1

    def test_nothing_is_past_its_time_before_it_says_so(self, monkeypatch):
        monkeypatch.setattr(TestWithAHold, "retention", timedelta(days=400))

        assert prune("default", now=NOW).kept == {}

    def test_days_go_that_are_past_the_retention_once_it_holds_nothing(self, monkeypatch):
        monkeypatch.setattr(TestWithAHold, "retention", None)

        assert len(prune("default", now=NOW).days) == 3

    def test_an_alert_is_sent_when_the_days_of_grace_are_over(self, alerts):
        prune("default", now=NOW)

        assert len(alerts) == 1
        assert "2001-02-03 (not copied yet)" in alerts[0]["reason"]
        assert "2001-02-12" not in alerts[0]["reason"]


class TestWithoutTheAppOfAHold:
    def test_nothing_is_pruned_where_settings_name_it(self, settings):
        """The app would archive the days first, but is not installed to hold them."""
        settings.INSTALLED_APPS = [app for app in settings.INSTALLED_APPS if app not in ("outbox.pipeline", "project.demo")]
        settings.OUTBOX = {**settings.OUTBOX, "PIPELINE": {"ARCHIVE": {"PATH": "/srv/lake"}}}

        with pytest.raises(ConfigurationError, match=r'INSTALLED_APPS \+= \["outbox\.pipeline"\]'):
            prune("default", now=NOW)
