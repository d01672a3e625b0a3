import pytest
from django.urls import reverse

from outbox.admin import catalogue
from outbox.errors import InvalidMessageType
from outbox.models import FailedDelivery, Inbox
from tests.factories import MessageRowFactory

pytestmark = pytest.mark.django_db(transaction=True)

PAGE = "admin:outbox_catalogue"


@pytest.fixture
def look(operator):
    return lambda: operator("view_topic").get(reverse(PAGE))


class TestThePage:
    def test_shows_types_with_promise_handlers_and_what_became_of_them(self, look, orders):
        row = MessageRowFactory(topic=orders, headers='{"ce-type": "OrderPlaced"}')
        Inbox.objects.create(consumer_group="cart", dedupe_key=row.id, message_id=row.id, topic="orders")
        FailedDelivery.objects.create(consumer_group="cart", topic="orders", message_id=row.id, delivery_count=1, outcome="retry")

        page = look().text

        assert "OrderPlaced <small>version 1, key invoice</small>" in page
        assert "Published once: a message that is sent again is not stored again." in page
        assert "1 published, the last one at" in page
        assert '<span class="outbox-badge outbox-waiting">100.0%</span>' in page
        assert "&quot;invoice&quot;: &quot;text&quot;" in page

    def test_shows_types_that_no_class_here_has(self, look, orders):
        MessageRowFactory(topic=orders, headers='{"ce-type": "<b>Old</b>"}')

        page = look().text

        assert "&lt;b&gt;Old&lt;/b&gt;: 1 published" in page

    def test_says_what_it_cannot_read(self, look, monkeypatch):
        def read_nothing():
            raise InvalidMessageType("Message type shop.Odd cannot be described.")

        monkeypatch.setattr(catalogue, "read_entries", read_nothing)

        assert "Message type shop.Odd cannot be described." in look().text
