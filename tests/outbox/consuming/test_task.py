from datetime import timedelta

import pytest

from outbox import consumer
from outbox.brokers.memory import MemoryBroker
from outbox.errors import ConfigurationError
from outbox.tasks import consume
from project.shop.models import CartEntry
from tests.outbox.consuming.deliveries import outgoing
from tests.outbox.consuming.messages import Placed

pytestmark = pytest.mark.django_db


@pytest.fixture
def _clears_carts() -> None:
    @consumer(Placed, group="cart")
    def clear_cart(message, context):
        CartEntry.objects.create(invoice=message.invoice, change=-1)


@pytest.mark.usefixtures("_clears_carts")
class TestConsume:
    def test_handles_what_waits_and_closes_its_broker(self, broker, monkeypatch):
        closed = []
        monkeypatch.setattr(MemoryBroker, "close", lambda self: closed.append(self))
        broker.send([outgoing(Placed("A1")), outgoing(Placed("A2"))])

        consume("cart")

        assert CartEntry.objects.count() == 2
        assert broker.backlog("cart").waiting == {"orders": 0}
        assert len(closed) == 1

    def test_ends_in_time_though_messages_keep_coming(self, broker, settings):
        settings.OUTBOX = {**settings.OUTBOX, "CONSUMER": {"TASK_TIME": timedelta(seconds=0.2), "BATCH_SIZE": 1}}

        @consumer(Placed, group="mill")
        def send_another(message, context):
            broker.send([outgoing(Placed("another"))])

        broker.send([outgoing(Placed("A1"))])

        consume("mill")

        assert broker.backlog("mill").waiting == {"orders": 1}

    def test_closes_its_broker_when_it_is_broken_off(self, broker, monkeypatch):
        closed = []
        monkeypatch.setattr(MemoryBroker, "close", lambda self: closed.append(self))

        @consumer(Placed, group="interrupted")
        def interrupt(message, context):
            raise KeyboardInterrupt

        broker.send([outgoing(Placed("A1"))])

        with pytest.raises(KeyboardInterrupt):
            consume("interrupted")

        assert len(closed) == 1

    def test_names_the_known_groups(self):
        with pytest.raises(ConfigurationError, match="Choices are: cart"):
            consume("card")
