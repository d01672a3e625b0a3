from datetime import timedelta

import pytest
from django.urls import reverse
from django.utils import timezone

from outbox.admin import quick_check
from outbox.models import Gap, State
from tests.factories import BatchFactory, MessageRowFactory, message_id

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

    @pytest.mark.parametrize("time_zone", ["UTC", "Pacific/Kiritimati"])
    def test_looks_at_a_day(self, time_zone, operator, orders, settings):
        settings.TIME_ZONE = time_zone
        today = timezone.localtime().replace(hour=0, minute=0, second=0, microsecond=0)
        ago = [timedelta(days=1, milliseconds=1), timedelta(days=1), timedelta(hours=12), timedelta(milliseconds=1), timedelta()]
        for at in (today - one for one in ago):
            MessageRowFactory(topic=orders, id=message_id(at), created_at=at)
        client = operator("view_topic")

        page = client.get(reverse(PAGE), {"day": (today - timedelta(days=1)).date().isoformat()})

        assert page.context["answer"]["published"] == 3
        assert f'name="day" value="{(today - timedelta(days=1)).date()}"' in page.text
        assert client.get(reverse(PAGE), {"day": "2020-01-01", "window": "24h"}).context["answer"]["published"] > 0

    @pytest.mark.parametrize("day", ["yesterday", "2026-02-30", "0001-01-01", "9999-12-31", "\x00"])
    def test_refuses_what_is_not_a_day(self, day, operator):
        assert "This is not a day. Write it as 2026-03-01." in operator("view_topic").get(reverse(PAGE), {"day": day}).text

    def test_refuses_a_day_that_may_have_been_pruned(self, operator, settings):
        settings.OUTBOX = {**settings.OUTBOX, "RETENTION": timedelta(days=2)}
        day = timezone.localtime() - timedelta(days=2)

        page = operator("view_topic").get(reverse(PAGE), {"day": day.date().isoformat()})

        assert "messages of it may have been pruned" in page.text
        assert "answer" not in page.context

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
