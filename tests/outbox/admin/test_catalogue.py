import pytest
from django.urls import reverse

from outbox import consumer, message
from outbox.admin import catalogue
from outbox.catalogue.entries import TopicEntry, TypeEntry
from outbox.consuming import register
from outbox.models import FailedDelivery, Inbox
from tests.factories import MessageRowFactory

pytestmark = pytest.mark.django_db(transaction=True)

PAGE = "admin:outbox_catalogue"


@pytest.fixture(autouse=True)
def _types_of_the_shop(monkeypatch):
    """Forget the types that other tests define."""
    types = {name: kind for name, kind in message.registered.items() if kind.__module__.startswith("project.")}
    monkeypatch.setattr(message, "registered", types)


@pytest.fixture
def look(operator):
    return lambda: operator("view_topic").get(reverse(PAGE))


class TestThePage:
    def test_shows_types_with_promise_handlers_and_what_became_of_them(self, look, orders):
        row = MessageRowFactory(topic=orders, headers='{"ce-type": "OrderPlaced"}')
        Inbox.objects.create(consumer_group="cart", idempotency_key=row.id, message_id=row.id, topic="orders")
        FailedDelivery.objects.create(consumer_group="cart", topic="orders", message_id=row.id, delivery_count=1, outcome="retry")

        page = look().text

        assert "OrderPlaced <small>version 1, key invoice</small>" in page
        assert "Published once: a message that is sent again is not stored again." in page
        assert "1 published, the last one at" in page
        assert '<span class="outbox-badge outbox-waiting">100.0%</span>' in page
        assert "&quot;invoice&quot;: &quot;text&quot;" in page

    def test_counts_for_the_handler_of_a_topic_what_no_other_one_of_its_group_takes(self, look, orders, monkeypatch):
        monkeypatch.setattr(register, "registered", dict(register.registered))
        consumer(topic="orders", group="cart")(lambda message, context: None)
        for type_ in ("OrderPlaced", "OrderPlaced", "Old"):
            row = MessageRowFactory(topic=orders, headers=f'{{"ce-type": "{type_}"}}')
            Inbox.objects.create(consumer_group="cart", idempotency_key=row.id, message_id=row.id, topic="orders")

        _, _, rest = look().text.partition("All other messages of the topic")

        assert '<td class="outbox-number">1</td>' in rest.partition("</table>")[0]

    def test_shows_topics_and_types_with_any_name_and_without_a_docstring(self, look, monkeypatch):
        kind = TypeEntry("a b", "shop.AB", "", 1, [], "", "", {}, None)
        monkeypatch.setattr(catalogue, "read_entries", lambda: [TopicEntry('orders "1"', "", "", None, [kind], [])])

        page = look().text

        assert 'id="topic-orders%20%221%22"' in page
        assert "<p></p>" not in page

    def test_shows_types_that_no_class_here_has(self, look, orders):
        MessageRowFactory(topic=orders, headers='{"ce-type": "<b>Old</b>"}')

        page = look().text

        assert "&lt;b&gt;Old&lt;/b&gt;: 1 published" in page

    def test_says_which_type_cannot_be_described(self, look, monkeypatch):
        odd = TypeEntry("Odd", "shop.Odd", "", 1, [], "", "", {}, None, "Message type shop.Odd cannot be described.")
        good = TypeEntry("Good", "shop.Good", "", 1, [], "", "", {}, None)
        monkeypatch.setattr(catalogue, "read_entries", lambda: [TopicEntry("orders", "", "", None, [good, odd], [])])

        page = look().text

        assert "Message type shop.Odd cannot be described." in page
        assert page.count("JSON Schema") == 1
