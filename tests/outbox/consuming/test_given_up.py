"""What the broker's server gave up becomes a dead letter of the group, with the server's reason."""

from datetime import timedelta

import pytest

from outbox import consumer
from outbox.models import Deferred, Inbox
from tests.outbox.consuming.deliveries import outgoing
from tests.outbox.consuming.messages import Placed

pytestmark = pytest.mark.django_db

NO_WAIT = timedelta(0)
REASON = "delivered too often"


@pytest.fixture
def seen() -> list[str]:
    """The invoices that the handler of the group "cart" was called with."""
    seen: list[str] = []
    consumer(Placed, group="cart")(lambda message, context: seen.append(message.invoice))
    return seen


class TestGivenUp:
    def test_is_a_dead_letter_with_the_servers_reason(self, worker, broker, seen):
        message = outgoing(Placed(invoice="1"))
        broker.send([message])
        broker.give_up("cart", message, REASON)

        worker().step(NO_WAIT)

        row = Deferred.objects.get()
        assert (str(row.own_id), row.reason, row.error, row.dead_at is not None) == (message.message_id, "server", REASON, True)
        assert seen == []
        assert broker.backlog("cart").dead_letters == {}

    def test_is_dropped_where_the_group_has_handled_it(self, worker, broker, seen):
        message = outgoing(Placed(invoice="1"))
        broker.send([message])
        first = worker()
        first.step(NO_WAIT)
        broker.send([message])
        broker.give_up("cart", message, REASON)
        first.close()

        worker().step(NO_WAIT)

        assert Inbox.objects.count() == 1
        assert not Deferred.objects.exists()
        assert seen == ["1"]
        assert broker.backlog("cart").dead_letters == {}
