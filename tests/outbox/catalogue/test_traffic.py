import pytest
from django.utils import timezone

from outbox import database
from outbox.catalogue.traffic import Traffic, read_traffic
from outbox.models import Inbox
from outbox.testing.factories import FailedDeliveryFactory
from tests.factories import MessageRowFactory, TopicFactory

pytestmark = pytest.mark.django_db

NOW = timezone.now()


@pytest.fixture
def rows():
    """Three messages of one type and one without a type, of which `cart` has handled two and failed with two."""
    topic = TopicFactory(name="orders")
    rows = [MessageRowFactory(topic=topic, headers='{"ce-type": "OrderPlaced"}') for _ in range(3)]
    rows.append(MessageRowFactory(topic=topic, headers="{}"))
    for row in rows[:2]:
        Inbox.objects.create(consumer_group="cart", idempotency_key=row.id, message_id=row.id, topic="orders", handled_at=NOW)
    for row in rows[1:3]:
        for count in (1, 2):
            FailedDeliveryFactory(consumer_group="cart", message_id=row.id, delivery_count=count)
    return rows


def found() -> dict[tuple[str, str], Traffic]:
    return {(one.type, one.consumer_group): one for one in read_traffic(database.raw("default"))}


class TestTraffic:
    def test_is_counted_by_type_and_group(self, rows):
        traffic = found()

        assert (traffic["OrderPlaced", ""].messages, traffic["", ""].messages) == (3, 1)
        assert traffic["OrderPlaced", ""].last_at == rows[2].created_at
        handled = traffic["OrderPlaced", "cart"]
        assert (handled.messages, handled.failed, handled.last_at) == (3, 2, NOW)
        assert ("", "cart") not in traffic

    def test_is_of_the_newest_messages(self, rows, monkeypatch):
        monkeypatch.setattr("outbox.catalogue.traffic.NEWEST", 2)

        assert found()["OrderPlaced", ""].messages == 1

    def test_is_empty_where_nothing_was_published(self):
        assert found() == {}
