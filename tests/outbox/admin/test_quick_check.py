import pytest
from django.urls import reverse

from outbox.admin import quick_check
from outbox.models import Gap, State
from tests.factories import BatchFactory, MessageRowFactory

pytestmark = pytest.mark.django_db(transaction=True)

PAGE = "admin:outbox_quick_check"


@pytest.fixture
def look(operator):
    return lambda window="1h": operator("view_topic").get(reverse(PAGE), {"window": window})


@pytest.fixture
def sent(orders):
    row = MessageRowFactory(topic=orders)
    BatchFactory(topic=orders, message_ids=[row.id], state=State.SENT, sent_at=row.created_at)
    return row


class TestThePage:
    @pytest.mark.parametrize("window", ["", "' OR 1"])
    def test_looks_at_nothing_before_it_is_asked(self, look, window):
        page = look(window)

        assert "Check what was published in the last" in page.text
        assert "answer" not in page.context

    def test_says_that_nothing_is_missing(self, look, sent):
        page = look().text

        assert "nothing is missing" in page
        assert "handled by cart" in page

    def test_says_how_much_is_missing(self, look, sent, orders):
        MessageRowFactory(topic=orders)
        Gap.objects.create(consumer_group="cart", source="us", topic="orders", lane=1, first_number=7, last_number=8)

        assert "3 missing" in look().text

    def test_says_what_was_given_up(self, look, orders):
        BatchFactory(topic=orders, message_ids=[MessageRowFactory(topic=orders).id], state=State.DEAD)

        assert "nothing is missing, 1 given up" in look().text

    def test_proves_nothing_where_nothing_was_published(self, look):
        page = look().text

        assert "nothing was published" in page
        assert "outbox-good" not in page

    def test_says_why_it_has_no_answer(self, look, sent, monkeypatch):
        monkeypatch.setattr(quick_check, "STATEMENT_TIMEOUT", {"statement_timeout": "1ms"})
        monkeypatch.setattr(quick_check, "read_progress", lambda connection, *_, **__: connection.execute("SELECT pg_sleep(1)"))

        page = look().text

        assert "No answer" in page
        assert "Choose a shorter window" in page

    def test_is_offered_on_the_overview(self, operator):
        assert reverse(PAGE) in operator("view_topic").get(reverse("admin:outbox_overview_changelist")).text
