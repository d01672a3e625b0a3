"""The row of a half-first message and a tombstone, over two real connections; the naive look-up is the control that loses."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from django.contrib.auth.models import Group
from django.db import IntegrityError, connection, connections, transaction

import outbox
from outbox.batches.half_first import insert_prepared
from outbox.embedded.models import EmbeddedHalf
from outbox.errors import HalfNotStored
from outbox.message import COMMIT, ROLLBACK, UNKNOWN, Half, Resolution
from outbox.models import MessageRow
from outbox.publishing.draft import compose
from outbox.topics import topic_id
from tests.outbox.half_first.orders import GroupMade, announce, ask, half_first_token, is_rolled_back, shown
from tests.waiting import wait_until, wait_until_it_blocks

IS_SOMEBODY_WAITING = """
SELECT EXISTS (SELECT FROM pg_locks l JOIN pg_stat_activity a USING (pid)
WHERE NOT l.granted AND l.locktype = 'transactionid' AND a.datname = current_database())
"""


def asked_about() -> Half:
    """Return the half message that the broker holds, as it asks about it."""
    half = EmbeddedHalf.objects.get()
    return Half("orders", half.message_id, str(half.id), half.token)


@contextmanager
def in_thread(function: Callable[[], object]) -> Iterator[list[object]]:
    """Run a function beside the block; return its result, or its error, at the end."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(function())
        except Exception as error:
            results.append(error)
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield results
    finally:
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture
def make_slowly(gate):
    """Make a group, and wait at the gate with the transaction open."""

    @outbox.transactional(half_first=announce)
    def make_slowly(message):
        Group.objects.create(pk=message.group_id)
        assert gate.wait(20)

    return make_slowly


class TestACheckBackWhileTheTransactionIsOpen:
    def test_does_not_know_yet(self, make_slowly, gate, broker):
        with in_thread(make_slowly):
            half = wait_until(lambda: EmbeddedHalf.objects.exists() and asked_about())

            early = ask(half)
            gate.set()

        assert early is UNKNOWN
        assert ask(half) is COMMIT
        assert shown(broker) == [half.message_id]

    def test_waits_for_the_commit(self, settings, make_slowly, gate):
        settings.OUTBOX = {**settings.OUTBOX, "CHECK_BACK": {}}  # 2 s
        with in_thread(make_slowly):
            half = wait_until(lambda: EmbeddedHalf.objects.exists() and asked_about())
            with in_thread(lambda: ask(half)) as answers:
                wait_until(is_somebody_waiting)
                gate.set()

        assert answers == [COMMIT]

    def test_waits_for_the_rollback(self, settings, gate):
        @outbox.transactional(half_first=announce)
        def fail_slowly(message):
            assert gate.wait(20)
            raise LookupError

        settings.OUTBOX = {**settings.OUTBOX, "CHECK_BACK": {}}
        with in_thread(fail_slowly):
            half = wait_until(lambda: EmbeddedHalf.objects.exists() and asked_about())
            with in_thread(lambda: ask(half)) as answers:
                wait_until(is_somebody_waiting)
                gate.set()

        assert answers == [ROLLBACK]
        assert MessageRow.objects.get().topic_id == 0

    def test_loses_the_message_where_it_looks_the_business_row_up(self, make_slowly, gate, broker):
        """The control: what RocketMQ's examples do, in the same interleaving, without a relay to send it again."""

        def naive(half: Half) -> Resolution:
            return COMMIT if Group.objects.filter(pk=EmbeddedHalf.objects.get().key).exists() else ROLLBACK

        with in_thread(make_slowly):
            wait_until(EmbeddedHalf.objects.exists)

            broker.check_halves(naive)
            gate.set()

        assert Group.objects.count() == 1
        assert shown(broker) == []
        assert is_rolled_back()


class TestTheFence:
    def test_breaks_a_transaction_whose_tombstone_was_first(self):
        draft = compose(GroupMade(group_id=1))
        half = Half("orders", str(draft.id), "4711", half_first_token())
        assert ask(half) is ROLLBACK

        def write():
            with transaction.atomic():
                Group.objects.create(name="staff")
                insert_prepared(draft, topic_id("orders", "default"), "default", half_id="4711", about=None)

        with pytest.raises(HalfNotStored, match=f"{draft.id} .GroupMade. was rolled back by a check-back"):
            write()

        assert Group.objects.count() == 0
        assert ask(half) is ROLLBACK

    def test_waits_for_a_tombstone_that_is_being_written(self, other_connection):
        draft = compose(GroupMade(group_id=1))
        topic = topic_id("orders", "default")

        def write():
            with transaction.atomic():
                insert_prepared(draft, topic, "default", half_id="4711", about=None)

        with other_connection.transaction():
            other_connection.execute("INSERT INTO outbox_message (id, topic_id, body) VALUES (%s, 0, '')", [draft.id])
            with in_thread(write) as results:
                wait_until_it_blocks(other_connection)
                other_connection.execute("COMMIT; BEGIN")

        assert [type(result) for result in results] == [HalfNotStored]

    def test_leaves_other_errors_of_integrity_as_they_are(self):
        draft = compose(GroupMade(group_id=1))
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE outbox_batch ADD CONSTRAINT never CHECK (state <> 2) NOT VALID")
        try:
            with pytest.raises(IntegrityError, match="never"), transaction.atomic():
                insert_prepared(draft, topic_id("orders", "default"), "default", half_id="4711", about=None)
        finally:
            with connection.cursor() as cursor:
                cursor.execute("ALTER TABLE outbox_batch DROP CONSTRAINT never")


def is_somebody_waiting() -> bool:
    with connection.cursor() as cursor:
        cursor.execute(IS_SOMEBODY_WAITING)
        return bool(cursor.fetchone()[0])
