"""The order of a key, through schedules of two relays, refused messages, and messages that are sent again."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import transaction

from outbox import database
from outbox.batches.operators import resend
from outbox.models import Ticket
from outbox.publishing.key_locks import LOCK_KEY, ORDER_KEY
from tests.factories import MessageRowFactory, TicketFactory, TopicFactory
from tests.outbox.batches.order_model import FAR, Budget, OrderModel
from tests.outbox.relay.claiming import claims
from tests.waiting import wait_until_it_blocks

INSERT = """
WITH message AS (INSERT INTO outbox_message (id, topic_id, key, body) VALUES (%s, %s, 'a', ''))
INSERT INTO outbox_ticket (message_id, topic_id, order_key) VALUES (%s, %s, hashtextextended('a', %s))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.django_db
class TestOrderOfAKey:
    @pytest.mark.parametrize(
        ("last_numbers", "size", "budget"),
        [({1: 30, 2: 0}, 3, Budget(failures=1, acts=1)), ({1: 0, 2: 0}, 2, Budget(failures=1, acts=2))],
        ids=["numbers-far-apart", "equal-numbers"],
    )
    def test_holds_in_all_schedules_of_two_relays_and_an_operator(self, committer, last_numbers, size, budget):
        model = OrderModel(committer, last_numbers, size)

        model.explore(budget)
        model.close()

        assert model.faults == []
        assert len(model.seen) > 400


@pytest.fixture
def fifo():
    return TopicFactory(type="fifo")


@pytest.fixture
def publish(fifo):
    """Write a message of a key, with or without its ticket."""

    def publish(key="a", *, ticket=True):
        message = MessageRowFactory(topic=fifo, key=key)
        if ticket:
            row = database.raw("default").execute(ORDER_KEY, [key, fifo.id]).fetchone()
            TicketFactory(topic=fifo, message=message, order_key=row[0])
        return message.id

    return publish


def again(*ids):
    with transaction.atomic():
        assert resend(database.raw("default"), ids, lost_before=FAR).messages == len(ids)


@pytest.mark.django_db
class TestTicketOfALostMessage:
    """One that has neither ticket nor batch: its ticket was deleted by hand."""

    def lose(self, *ids):
        Ticket.objects.filter(message_id__in=ids).delete()

    def claimed(self):
        (batch,) = claims().claim_ordered()
        return batch.message_ids

    @pytest.mark.parametrize("lost", [[0], [1], [2], [0, 1], [1, 0], [0, 2], [3, 1]])
    def test_gets_the_position_of_the_original_one(self, publish, lost):
        ids = [publish() for _ in range(4)]
        self.lose(*(ids[n] for n in lost))

        again(*(ids[n] for n in lost))

        assert len(set(Ticket.objects.values_list("pos"))) == 4
        assert self.claimed() == [str(one) for one in ids]

    def test_stands_there_too_when_they_are_resent_one_after_the_other(self, publish):
        ids = [publish() for _ in range(4)]
        self.lose(*ids[:3])

        for one in (ids[1], ids[0], ids[2]):
            again(one)

        assert self.claimed() == [str(one) for one in ids]

    def test_does_not_overtake_other_keys(self, publish):
        other, lost, later = publish("b"), publish(), publish("b")
        self.lose(lost)

        again(lost)

        assert self.claimed() == [str(one) for one in (other, later, lost)]


@pytest.mark.django_db(transaction=True)
class TestPublisherOfTheKeyOfALostMessage:
    def test_is_waited_for_so_that_its_message_comes_later(self, publish, fifo, connect):
        lost, publisher, operator = publish(ticket=False), connect(), connect()

        with ThreadPoolExecutor(1) as pool:
            with publisher.transaction():
                publisher.execute(LOCK_KEY, [fifo.id, "a", "a", fifo.id])
                later = MessageRowFactory.build(topic=fifo, key="a")
                publisher.execute(INSERT, [later.id, fifo.id, later.id, fifo.id, fifo.id])
                resent = pool.submit(self.resend, operator, lost)
                wait_until_it_blocks(publisher)
            resent.result(10)
        (batch,) = claims().claim_ordered()

        assert batch.message_ids == [str(lost), str(later.id)]

    def resend(self, connection, message):
        with connection.transaction():
            resend(connection, [message], lost_before=FAR)
