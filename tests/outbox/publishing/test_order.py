"""Two publishers on connections of their own; ordered topics keep the order of their commits."""

import threading

import pytest
from django.contrib.auth.models import Group
from django.db import connection, transaction

from outbox import database, publish, publish_many
from outbox.database.locks import Lock
from outbox.models import Ticket
from outbox.publishing import key_locks
from tests.outbox.publishing.rows import ParcelMoved, message_rows, tickets
from tests.waiting import wait_until_it_blocks

# By kind, those that this connection holds.
HELD = f"""
SELECT classid::int, count(*) FROM pg_locks
WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND classid IN ({Lock.KEY}, {Lock.TOPIC_KEYS}) GROUP BY 1 ORDER BY 1
"""

pytestmark = pytest.mark.django_db(transaction=True)


def in_thread(call):
    """Run a call in a thread, in a transaction of its own."""

    def run():
        try:
            with transaction.atomic():
                call()
        finally:
            connection.close()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


class TestAnOrderedTopic:
    def test_takes_one_statement_more(self, django_assert_num_queries):
        with transaction.atomic():
            publish(ParcelMoved(parcel="A"))

            with django_assert_num_queries(2):
                publish(ParcelMoved(parcel="A"))

    @pytest.mark.parametrize("call", [lambda m: publish(m), lambda m: publish_many([m])], ids=["publish", "publish_many"])
    def test_lets_the_next_publisher_of_a_key_wait_for_the_commit(self, call):
        with transaction.atomic():
            publish(ParcelMoved(parcel="A", place=1))
            second = in_thread(lambda: call(ParcelMoved(parcel="A", place=2)))

            wait_until_it_blocks(database.raw("default"))
        second.join(10)

        assert [bytes(row.body) for row in message_rows()] == [b'{"parcel":"A","place":1}', b'{"parcel":"A","place":2}']
        assert len({ticket.order_key for ticket in tickets()}) == 1

    def test_lets_publishers_of_other_keys_pass(self):
        with transaction.atomic():
            publish(ParcelMoved(parcel="A"))
            other = in_thread(lambda: publish(ParcelMoved(parcel="B")))
            other.join(10)

            assert not other.is_alive()

        assert len(tickets()) == 2

    @pytest.mark.timeout(120)
    def test_takes_tens_of_thousands_of_keys_in_one_transaction(self):
        """PostgreSQL has room for about 10,000 locks, of all transactions together."""
        with transaction.atomic():
            publish_many([ParcelMoved(parcel=str(number)) for number in range(50_000)])
            others = in_thread(lambda: Group.objects.create(name="others"))
            others.join(10)

        assert Group.objects.exists()
        assert Ticket.objects.count() == 50_000

    def test_locks_its_topic_where_a_transaction_has_very_many_keys(self, monkeypatch):
        monkeypatch.setattr(key_locks, "MAX_KEYS", 3)
        with transaction.atomic():
            publish_many([ParcelMoved(parcel=str(number)) for number in range(5)])
            publish(ParcelMoved(parcel="6"))

            assert database.raw("default").execute(HELD).fetchall() == [(Lock.TOPIC_KEYS, 1)]
            other = in_thread(lambda: publish(ParcelMoved(parcel="another")))
            wait_until_it_blocks(database.raw("default"))
        other.join(10)

        with transaction.atomic():
            publish(ParcelMoved(parcel="A"))
            assert database.raw("default").execute(HELD).fetchall() == [(Lock.KEY, 1), (Lock.TOPIC_KEYS, 1)]

    def test_locks_its_topic_in_a_transaction_that_came_to_very_many_keys_where_it_is_free(self, monkeypatch):
        monkeypatch.setattr(key_locks, "MAX_KEYS", 3)
        with transaction.atomic():
            for number in range(9):
                publish(ParcelMoved(parcel=str(number)))

            assert database.raw("default").execute(HELD).fetchall() == [(Lock.KEY, 3), (Lock.TOPIC_KEYS, 2)]

    @pytest.mark.timeout(30)
    def test_has_no_deadlock_where_two_transactions_come_to_very_many_keys(self, monkeypatch):
        monkeypatch.setattr(key_locks, "MAX_KEYS", 3)
        with transaction.atomic():
            publish_many([ParcelMoved(parcel=f"mine-{number}") for number in range(2)])
            theirs = in_thread(lambda: [publish(ParcelMoved(parcel=f"theirs-{number}")) for number in range(9)])
            theirs.join(10)
            publish_many([ParcelMoved(parcel=f"mine-{number}") for number in range(9)])

        assert len(tickets()) == 20

    def test_waits_with_very_many_keys_for_the_publishers_of_each(self, monkeypatch):
        monkeypatch.setattr(key_locks, "MAX_KEYS", 3)
        with transaction.atomic():
            publish(ParcelMoved(parcel="A", place=1))
            many = in_thread(lambda: publish_many([ParcelMoved(parcel=key, place=2) for key in "ABCDE"]))

            wait_until_it_blocks(database.raw("default"))
        many.join(10)

        assert len(tickets()) == 6

    def test_has_no_deadlock_where_many_are_published_in_any_order(self):
        parcels = [ParcelMoved(parcel=str(n)) for n in range(40)]
        failed = []

        def publish_all(messages):
            try:
                for _ in range(10):
                    with transaction.atomic():
                        publish_many(messages)
            except Exception as error:
                failed.append(error)
            finally:
                connection.close()

        threads = [threading.Thread(target=publish_all, args=[order]) for order in (parcels, parcels[::-1])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)

        assert failed == []
        assert len(tickets()) == 800
