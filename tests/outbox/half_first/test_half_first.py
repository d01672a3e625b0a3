"""The canonical order, in one process, on the embedded broker; and each way in which it does not go well."""

import logging
from contextlib import suppress
from datetime import timedelta

import pytest
from django.contrib.auth.models import Group
from django.db import DatabaseError, IntegrityError, OperationalError, connection, connections, transaction
from django.test.utils import CaptureQueriesContext

import outbox
from outbox import Message, half_first
from outbox.brokers.base import Ended, EndSemantics, SendStatus
from outbox.errors import BrokenTransaction, ConfigurationError, HalfNotStored, NotOutermost
from outbox.message import COMMIT, ROLLBACK, Half, Header
from outbox.models import Batch, MessageRow, State
from tests.outbox.half_first.orders import (
    GroupMade,
    announce,
    ask,
    committed_half,
    is_hidden,
    is_rolled_back,
    make_group,
    next_key,
    shown,
    stored_half,
)


class Broken(Exception):
    """Raised by work that is told to."""


@outbox.transactional(half_first=announce)
def fail_after_writing(message):
    Group.objects.create(pk=message.group_id)
    raise Broken


class TestHalfFirst:
    def test_publishes_with_the_database_commit(self, broker):
        group = make_group()

        assert Group.objects.get() == group
        assert shown(broker) == [str(MessageRow.objects.get().id)]
        batch = Batch.objects.get()
        assert (batch.state, batch.attempt, batch.lane, batch.first_seq) == (State.SENT, 1, None, None)

    def test_has_its_half_message_stored_and_hidden_when_the_work_begins(self, broker, other_connection):
        seen = []

        @outbox.transactional(half_first=announce)
        def work(message):
            seen.append(other_connection.execute("SELECT message_id, token FROM outbox_embedded_half").fetchone())
            seen.append(other_connection.execute("SELECT count(*) FROM outbox_message").fetchone())
            seen.append(shown(broker))

        work()

        half = committed_half()
        assert seen == [(half.message_id, half.token), (0,), []]

    def test_writes_row_and_batch_before_anything_else(self):
        make_group().delete()  # finds the topic

        with CaptureQueriesContext(connection) as queries:
            make_group()

        kinds = [query["sql"].split("(")[0].split()[:4] for query in queries]
        assert [words[0] for words in kinds] == ["SELECT", "SELECT", "BEGIN", "WITH", "INSERT", "COMMIT", "UPDATE"]
        assert "paused" in queries[1]["sql"]
        assert "outbox_message" in queries[3]["sql"]
        assert "outbox_batch" in queries[3]["sql"]

    def test_travels_with_its_origin_and_without_a_number(self, broker):
        group = make_group()

        [delivery] = broker.receive("group", {"orders": None}, limit=1, invisible_for=timedelta(1), wait=timedelta(0))
        assert (delivery.key, delivery.body) == (str(group.pk), b'{"group_id":%d,"name":"staff"}' % group.pk)
        assert delivery.headers[Header.ABOUT] == f"auth.group:{group.pk}"
        assert delivery.headers[Header.SUBJECT] == str(group.pk)
        assert delivery.headers[Header.SPEC_VERSION] == "1.0"
        assert Header.NUMBER not in delivery.headers

    def test_leaves_room_for_other_messages_in_its_transaction(self, relay, broker):
        @outbox.transactional(half_first=announce)
        def work(message):
            outbox.publish(GroupMade(group_id=0))

        work()
        before = len(shown(broker))
        relay.drain()

        assert (before, len(shown(broker))) == (1, 2)


class TestWorkThatFails:
    def test_is_rolled_back_with_its_half_message(self, broker):
        with pytest.raises(Broken):
            fail_after_writing()

        assert Group.objects.count() == MessageRow.objects.count() == Batch.objects.count() == 0
        assert is_rolled_back()
        assert shown(broker) == []

    def test_is_rolled_back_where_it_says_so_without_an_exception(self):
        @outbox.transactional(half_first=announce)
        def work(message):
            Group.objects.create(pk=message.group_id)
            transaction.set_rollback(True)
            return "an answer"

        assert work() == "an answer"

        assert Group.objects.count() == MessageRow.objects.count() == 0
        assert is_rolled_back()

    def test_is_rolled_back_where_the_server_refuses_the_commit(self):
        """A deferred constraint speaks at COMMIT."""

        @outbox.transactional(half_first=announce)
        def work(message):
            group = Group.objects.create(pk=message.group_id)
            Group.permissions.through.objects.create(group_id=group.pk, permission_id=4711)

        with pytest.raises(IntegrityError):
            work()

        assert Group.objects.count() == 0
        assert is_rolled_back()

    def test_does_not_swallow_an_error_of_the_database(self):
        """PostgreSQL answers the COMMIT of a broken transaction by a rollback, without a word."""

        @outbox.transactional(half_first=announce)
        def work(message):
            Group.objects.create(pk=message.group_id)
            try:
                connection.cursor().execute("SELECT 1 / 0")
            except DatabaseError:
                return

        with pytest.raises(BrokenTransaction, match="GroupMade"):
            work()

        assert Group.objects.count() == MessageRow.objects.count() == 0
        assert is_rolled_back()

    def test_does_not_swallow_an_error_for_which_django_rolls_back(self):
        @outbox.transactional(half_first=announce)
        def work(message):
            Group.objects.create(pk=message.group_id)
            with suppress(DatabaseError):
                Group.objects.create(pk=message.group_id)

        with pytest.raises(BrokenTransaction, match="GroupMade"):
            work()

        assert Group.objects.count() == MessageRow.objects.count() == 0
        assert is_rolled_back()

    def test_may_fail_in_a_savepoint(self, broker):
        @outbox.transactional(half_first=announce)
        def work(message):
            Group.objects.create(pk=message.group_id)
            with suppress(Broken), transaction.atomic():
                Group.objects.create(name="other")
                raise Broken

        work()

        assert Group.objects.count() == len(shown(broker)) == 1

    def test_raises_its_own_error_where_the_rollback_fails_too(self, memory, monkeypatch, caplog):
        def end(*args, **options):
            raise ConnectionError

        monkeypatch.setattr(type(memory), "end", end)

        with pytest.raises(Broken):
            fail_after_writing()

        assert "could not be rolled back; a check-back does so" in caplog.text

    def test_keeps_what_was_committed_before_another_hook_failed(self, broker):
        @outbox.transactional(half_first=announce)
        def work(message):
            transaction.on_commit(lambda: 1 / 0)

        with pytest.raises(ZeroDivisionError):
            work()

        assert len(shown(broker)) == 1
        assert Batch.objects.get().state == State.SENT

    def test_is_not_taken_for_undone_when_another_hook_meets_a_refusal(self, use_memory):
        memory = use_memory(EndSemantics.STATELESS)  # a ROLLBACK would count, whenever it comes

        @outbox.transactional(half_first=announce)
        def work(message):
            transaction.on_commit(lambda: Group.objects.create(name="staff"))
            Group.objects.create(name="staff")

        with pytest.raises(IntegrityError):
            work()

        assert [half.ended for half in memory.halves()] == [Ended.COMMITTED]


class TestAHalfMessageThatIsNotSurelyStored:
    @pytest.mark.parametrize("verdict", [verdict for verdict in SendStatus if verdict is not SendStatus.ACCEPTED])
    @pytest.mark.parametrize("is_stored", [True, False])
    def test_keeps_the_work_from_beginning(self, memory, verdict, is_stored):
        memory.fail("send_halves", verdict, stored=is_stored, reason="the disk is slow")

        with pytest.raises(HalfNotStored, match=f"GroupMade .* {verdict}: the disk is slow"):
            make_group()

        assert Group.objects.count() == MessageRow.objects.count() == Batch.objects.count() == 0
        assert memory.visible("orders") == []

    def test_is_rolled_back_by_the_check_back(self, memory):
        memory.fail("send_halves", SendStatus.UNSURE, stored=True)
        with pytest.raises(HalfNotStored):
            make_group()
        [half] = memory.halves()
        before = half.ended
        message = half.message

        answer = ask(Half("orders", message.message_id, half.id, message.token))

        assert (before, answer) == (None, ROLLBACK)

    def test_is_one_that_an_exception_was_raised_for(self, memory, monkeypatch):
        def send_halves(*args):
            raise ConnectionError("gone")

        monkeypatch.setattr(type(memory), "send_halves", send_halves)

        with pytest.raises(HalfNotStored, match="ConnectionError: gone"):
            make_group()

        assert MessageRow.objects.count() == 0

    def test_is_one_of_a_broker_that_is_out_of_reach(self, settings, monkeypatch):
        monkeypatch.setitem(connections.settings, "away", {**connections.settings["default"], "HOST": "127.0.0.1", "PORT": "1"})
        brokers = {"default": {"OPTIONS": {"DATABASE": "away"}}}
        settings.OUTBOX = {"BROKERS": brokers, "TOPICS": {"orders": {"TYPE": "transaction"}}}

        with pytest.raises(HalfNotStored, match="GroupMade was not sent half first"):
            make_group()
        del connections["away"]

        assert MessageRow.objects.count() == 0


class TestADatabaseCommitOfUnknownEnd:
    def test_leaves_the_half_message_of_a_lost_transaction_to_the_check_back(self, broker):
        """The server ends the session at the COMMIT."""
        with connection.cursor() as cursor:
            cursor.execute(
                """
                CREATE FUNCTION hang_up() RETURNS trigger LANGUAGE plpgsql AS
                'BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END';
                CREATE CONSTRAINT TRIGGER hang_up AFTER INSERT ON auth_group
                DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION hang_up()
                """
            )
        try:
            with pytest.raises(OperationalError):
                make_group()
        finally:
            connection.close()
            with connection.cursor() as cursor:
                cursor.execute("DROP TRIGGER hang_up ON auth_group; DROP FUNCTION hang_up()")

        assert is_hidden()
        assert broker.check_halves(ask) == 1
        assert is_rolled_back()
        assert Group.objects.count() == 0

    def test_leaves_the_half_message_of_a_committed_transaction_to_the_check_back(self, broker, monkeypatch):
        """The server commits, and its answer is lost."""
        commit = connection.commit

        def commit_and_lose_the_answer():
            commit()
            raise OperationalError("server closed the connection unexpectedly")

        monkeypatch.setattr(connection, "commit", commit_and_lose_the_answer)
        with pytest.raises(OperationalError):
            make_group()
        monkeypatch.undo()

        assert is_hidden()
        assert ask(committed_half()) is COMMIT
        broker.check_halves(ask)
        assert Group.objects.count() == len(shown(broker)) == 1


class TestWhereItIsRefused:
    def test_inside_a_transaction(self):
        with transaction.atomic(), pytest.raises(NotOutermost, match=r"GroupMade .* @non_atomic_requests"):
            make_group()

        assert stored_half() is None

    @pytest.mark.urls("tests.outbox.half_first.views")
    def test_under_atomic_requests(self, client):
        connection.settings_dict["ATOMIC_REQUESTS"] = True
        try:
            with pytest.raises(NotOutermost):
                client.get("/made/")
            status = client.get("/made-without/").status_code
        finally:
            connection.settings_dict["ATOMIC_REQUESTS"] = False

        assert (status, Group.objects.count()) == (200, 1)

    def test_where_autocommit_is_off(self):
        transaction.set_autocommit(False)

        with pytest.raises(NotOutermost, match="Autocommit of database 'default' was off"):
            make_group()

        assert stored_half() is None

    @pytest.mark.parametrize(
        ("topic_name", "text"), [("notes", "topic 'notes' is of type normal"), ("letters", "OnePhaseBroker")]
    )
    def test_on_a_topic_without_half_messages(self, own_types, topic_name, text):
        class Noted(Message):
            class Meta:
                topic = topic_name

        with pytest.raises(ConfigurationError, match=text), outbox.atomic(half_first=Noted()):
            pytest.fail("the work began")

    @pytest.fixture
    def own_types(self, monkeypatch):
        monkeypatch.setattr("outbox.message.registered", {})


class TestTransaction:
    def test_takes_the_message_itself(self, broker):
        key = next_key()

        with outbox.atomic(half_first=GroupMade(group_id=key), about=Group(pk=key)) as alias:
            Group.objects.using(alias).create(pk=key)

        assert shown(broker) == [str(MessageRow.objects.get(about=f"auth.group:{key}").id)]

    def test_rolls_both_back(self):
        with pytest.raises(Broken), outbox.atomic(half_first=GroupMade(group_id=1)):
            raise Broken

        assert is_rolled_back()


class TestALog:
    def test_says_nothing_when_all_goes_well(self, caplog):
        caplog.set_level(logging.INFO, logger=half_first.__name__)

        make_group()

        assert caplog.messages == []
