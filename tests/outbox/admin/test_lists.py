"""What is typed into an address or a search box leads to an empty list or back to the whole one, never to an error."""

import itertools
from datetime import UTC, datetime
from uuid import UUID

import pytest
from django.urls import reverse

from outbox.models import CheckBack, Inbox, MessageRow
from outbox.testing.factories import CheckBackFactory
from tests.factories import MessageRowFactory, message_id

pytestmark = pytest.mark.django_db

LISTS = [
    "outbox_messagerow_changelist",
    "outbox_deadmessage_changelist",
    "outbox_checkback_changelist",
    "outbox_inboxrow_changelist",
    "outbox_embedded_embeddedhalf_changelist",
    "outbox_topic_changelist",
    "outbox_pipeline_archivedday_changelist",
    "outbox_pipeline_auditrun_changelist",
    "outbox_pipeline_auditfinding_changelist",
]
WILD = ["\x00", "%", "_", "'; DROP TABLE outbox_message; --", '"', "\\", "\u202e", "😀", "x" * 10_000, "-1", "9" * 400]
PARAMETERS = [
    *("p", "o", "before", "state", "topic", "group", "answer", "settled", "all", "e", "_facets", "id__lt", "x"),
    *("since", "from", "to"),
]


@pytest.fixture
def rows():
    """More check-backs than are counted."""
    CheckBack.objects.bulk_create(CheckBackFactory.build(request_id=str(n)) for n in range(1_050))


@pytest.mark.parametrize("view", LISTS)
class TestEachList:
    def test_finds_nothing_by_a_wild_text(self, view, admin_client):
        MessageRowFactory()

        for text in WILD:
            page = admin_client.get(reverse(f"admin:{view}"), {"q": text})

            assert page.status_code == 200
            if page.context["cl"].search_fields:
                assert list(page.context["cl"].result_list) == []

    def test_survives_wild_parameters(self, view, admin_client):
        url = reverse(f"admin:{view}")
        for name, text in itertools.product(PARAMETERS, ["\x00", "abc", "-1", "9" * 40, "%", ""]):
            page = admin_client.get(url, {name: text})

            assert page.status_code == 200 or (page.status_code, page.url) == (302, f"{url}?e=1"), (name, text)
        assert admin_client.get(f"{url}?e=1").status_code == 200

    def test_takes_no_look_up_but_its_filters(self, view, admin_client):
        answer = admin_client.get(reverse(f"admin:{view}"), {"headers__contains": "x"})

        assert (answer.status_code, answer.url) == (302, f"{reverse(f'admin:{view}')}?e=1")

    def test_orders_by_no_column_of_the_address(self, view, admin_client):
        page = admin_client.get(reverse(f"admin:{view}"), {"o": "2.1"})

        keyset = page.context["cl"].model_admin.keyset
        assert page.context["cl"].queryset.query.order_by == (f"-{keyset}",)


class TestPages:
    def test_go_through_the_newest_thousand_and_on_from_there(self, rows, admin_client):
        url = reverse("admin:outbox_checkback_changelist")
        newest = admin_client.get(url, {"p": 10})
        seen = {row.pk for page in range(1, 11) for row in admin_client.get(url, {"p": page}).context["cl"].result_list}

        older = admin_client.get(url + newest.context["cl"].older_url)

        assert "The newest 1000 check-backs" in newest.text
        assert len(seen) == 1000
        assert seen | {row.pk for row in older.context["cl"].result_list} == set(CheckBack.objects.values_list("pk", flat=True))
        assert "From " in older.text
        assert older.context["cl"].older_url == ""

    def test_offer_older_rows_on_the_last_page_only(self, rows, admin_client):
        page = admin_client.get(reverse("admin:outbox_checkback_changelist"))

        assert page.context["cl"].older_url == ""

    def test_count_no_facets(self, rows, admin_client):
        page = admin_client.get(reverse("admin:outbox_checkback_changelist"), {"_facets": "True"})

        assert "(1050)" not in page.text


class TestAFilterWithoutAnIndex:
    def test_looks_at_the_newest_rows_and_goes_on_from_there(self, rows, admin_client, monkeypatch):
        monkeypatch.setattr("outbox.admin.lists.MAX_READ", 100)
        CheckBack.objects.filter(request_id="0").update(answer="UNKNOWN")
        url = reverse("admin:outbox_checkback_changelist")
        found, looks, address = [], 0, "?answer=UNKNOWN"

        while address:
            page = admin_client.get(url + address)
            found += page.context["cl"].result_list
            address = page.context["cl"].older_url
            looks += 1

        assert [row.request_id for row in found] == ["0"]
        assert looks == 11

    def test_is_not_needed_where_a_search_has_found_its_rows(self, rows, admin_client, monkeypatch):
        monkeypatch.setattr("outbox.admin.lists.MAX_READ", 100)
        CheckBack.objects.filter(request_id="0").update(message_id="old")

        page = admin_client.get(reverse("admin:outbox_checkback_changelist"), {"q": "old", "answer": "COMMIT"})

        assert len(page.context["cl"].result_list) == 1


class TestATimeFilter:
    def test_finds_the_rows_of_a_time_however_old(self, rows, admin_client, monkeypatch):
        monkeypatch.setattr("outbox.admin.lists.MAX_READ", 100)
        CheckBack.objects.filter(request_id="0").update(answered_at="2026-03-01T12:00:30Z")
        url = reverse("admin:outbox_checkback_changelist")

        def found(**asked):
            return [row.request_id for row in admin_client.get(url, asked).context["cl"].result_list]

        assert found(**{"from": "2026-03-01T12:00:30Z", "to": "2026-03-01T12:00:31Z"}) == ["0"]
        assert found(to="2026-03-01T12:00:30Z") == found(**{"from": "2926-03-01T12:00"}) == []
        assert len(found(since="hour")) == 100

    def test_goes_by_the_time_in_a_message_s_id(self, message, admin_client):
        old = message(id=UUID(int=int(datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp() * 1000) << 80), batch={"state": 4})
        new = message(batch={"state": 4})
        url = reverse("admin:outbox_messagerow_changelist")

        def found(**asked):
            return admin_client.get(url, asked).context["cl"].result_list

        assert found(since="day") == found(since="day", state="dead") == [new]
        assert found(to="2026-03-01T12:00:01Z") == found(to="2026-03-01T12:00:01Z", state="dead") == [old]
        assert found(**{"from": "2026-03-01T11:00Z", "to": "2026-03-01T12:00Z"}) == []

    def test_goes_with_what_else_is_asked_for_and_from_page_to_page(self, rows, admin_client):
        url = reverse("admin:outbox_checkback_changelist")

        page = admin_client.get(url, {"since": "week", "answer": "COMMIT", "p": "10"})

        assert "since=week" in page.context["cl"].older_url
        assert '<input type="hidden" name="answer" value="COMMIT">' in page.text
        assert '<a href="?answer=COMMIT&amp;since=day">The last day</a>' in page.text


class TestCheckBacks:
    def test_show_what_the_broker_was_sent_instead(self, admin_client):
        CheckBackFactory(answer="COMMIT", sent_answer="ROLLBACK")

        page = admin_client.get(reverse("admin:outbox_checkback_changelist"))

        assert "COMMIT, sent as ROLLBACK: already visible" in page.text


class TestInbox:
    def test_is_searched_by_message_and_by_idempotency_key(self, admin_client):
        one = message_id()
        Inbox.objects.create(consumer_group="cart", idempotency_key="Order:1", message_id=one, topic="orders")
        Inbox.objects.create(consumer_group="points", idempotency_key=str(one), message_id=one, topic="orders")
        url = reverse("admin:outbox_inboxrow_changelist")

        by_message = admin_client.get(url, {"q": str(one)}).context["cl"].result_list
        by_key = admin_client.get(url, {"q": "Order:1"}).context["cl"].result_list

        assert ({row.consumer_group for row in by_message}, {row.consumer_group for row in by_key}) == (
            {"cart", "points"},
            {"cart"},
        )

    def test_passes_no_row_over_that_has_the_same_time_as_the_last(self, admin_client, monkeypatch):
        monkeypatch.setattr("outbox.admin.lists.MAX_COUNTED", 1)
        ids = [message_id() for _ in range(3)]
        for one in ids:
            Inbox.objects.create(
                consumer_group="cart", idempotency_key=str(one), message_id=one, topic="orders", handled_at="2026-01-01T12:00:00Z"
            )
        url = reverse("admin:outbox_inboxrow_changelist")

        older = admin_client.get(url + admin_client.get(url).context["cl"].older_url)

        assert older.context["cl"].paginator.is_more


def test_a_message_that_is_not_there_leads_back(admin_client):
    for wrong in (message_id(), "abc", "%00", "1" * 300):
        answer = admin_client.get(f"/admin/outbox/messagerow/{wrong}/change/")

        assert answer.status_code == 302
    assert not MessageRow.objects.exists()
