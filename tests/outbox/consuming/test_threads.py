import threading

import pytest

from outbox import conf, consumer
from outbox.brokers.memory import MemoryBroker
from outbox.consuming.register import groups
from outbox.consuming.worker import ConsumerThreads
from outbox.models import Inbox
from project.shop.models import CartEntry
from tests.outbox.consuming.deliveries import outgoing
from tests.outbox.consuming.messages import Placed
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


class TestConsumerThreads:
    def test_handles_side_by_side(self, broker, settings):
        settings.OUTBOX = {**settings.OUTBOX, "CONSUMER": {"BATCH_SIZE": 1}}
        both = threading.Barrier(2, timeout=10)

        @consumer(Placed, group="cart")
        def meet(message, context):
            both.wait()
            CartEntry.objects.create(invoice=message.invoice, change=1)

        broker.send([outgoing(Placed("A1")), outgoing(Placed("A2"))])
        consumers = ConsumerThreads(list(groups().values()), threads=2)

        consumers.start(until_idle=True)
        consumers.join()

        assert consumers.counts()["cart"].handled == 2
        assert CartEntry.objects.count() == 2

    def test_serves_each_group_and_broker(self, broker):
        consumer(Placed, group="cart")(lambda message, context: None)
        consumer(topic="elsewhere", group="cart")(lambda message, context: None)
        consumer(Placed, group="points")(lambda message, context: None)
        broker.send([outgoing(Placed("A1"))])
        conf.make_broker("second").send([outgoing(Placed("A2"), topic="elsewhere")])
        consumers = ConsumerThreads(list(groups().values()))

        consumers.start()
        wait_until(lambda: Inbox.objects.count() == 3)
        consumers.stop()
        consumers.join()

        assert {name: counts.handled for name, counts in consumers.counts().items()} == {"cart": 2, "points": 1}
        assert consumers.targets() == {
            ("default", "default", "cart"), ("default", "second", "cart"), ("default", "default", "points"),
        }  # fmt: skip

    def test_ends_as_a_whole_when_one_worker_is_broken_off(self, broker, monkeypatch):
        consumer(Placed, group="cart")(lambda message, context: None)
        consumer(topic="elsewhere", group="cart")(lambda message, context: None)
        receive = MemoryBroker.receive

        def break_off(self, group, topics, **arguments):
            if "orders" in topics:
                raise SystemExit
            return receive(self, group, topics, **arguments)

        monkeypatch.setattr(MemoryBroker, "receive", break_off)
        consumers = ConsumerThreads(list(groups().values()))

        consumers.start()

        with pytest.raises(SystemExit):
            consumers.join()
        assert not consumers.is_working()
