import json
from datetime import UTC, datetime

import pytest
from django.contrib.auth.models import Permission, User
from django.urls import reverse

from outbox import atomic, publish, publish_raw
from outbox.extensions import Extension
from outbox.ids import first_id_at
from outbox.message import Message, message_type
from outbox.models import DeadMessage, OperatorAct, State
from outbox.monitoring import find
from outbox.testing.factories import CheckBackFactory, DeferredFactory, FailedDeliveryFactory, InboxFactory
from project.shop.models import Order
from tests.factories import BatchFactory, TicketFactory, message_id

pytestmark = pytest.mark.django_db

LIST = "admin:outbox_messagerow_changelist"
PAGE = "admin:outbox_messagerow_change"
VIEW = "view_messagerow"


@pytest.fixture
def masked(monkeypatch):
    """Make a type with a mask, for this test alone."""
    monkeypatch.setattr("outbox.message.registered", {})

    class OrderPlaced(Message):
        order_id: int
        customer: str

        class Meta:
            topic = "orders"
            mask = ["customer"]

    return json.dumps({"ce-type": "OrderPlaced", "content-type": "application/json"})


@pytest.fixture
def order():
    return Order.objects.create(invoice="536365", country="France", total=1, invoiced_at="2010-12-01T08:26:00Z")


def opened(client, row):
    return client.get(reverse(PAGE, args=[row.id]))


def searched(client, text, **filters):
    return client.get(reverse(LIST), {"q": text, **filters}).context["cl"].result_list


class TestList:
    def test_has_those_of_a_type(self, masked, admin_client):
        kind = message_type("OrderPlaced")
        with atomic():
            placed = publish(kind(order_id=1, customer="Müller"))
            publish_raw("orders", {})

        rows = searched(admin_client, "", type="OrderPlaced")

        assert [row.id for row in rows] == [placed.message_id]

    def test_shows_state_topic_key_attempts_and_reason(self, message, admin_client):
        message(key="536365", batch={"state": State.RELEASED, "failures": 2, "attempt": 3, "last_error": "time-out"})

        page = admin_client.get(reverse(LIST)).text

        for text in ("retrying", "orders", "536365", '<td class="field-attempt">3</td>', "time-out"):
            assert text in page

    def test_shows_the_type(self, message, admin_client):
        message(headers=json.dumps({"ce-type": "shop.tasks.send_mail"}))

        assert "shop.tasks.send_mail" in admin_client.get(reverse(LIST)).text

    def test_does_not_show_what_a_group_gave_up_as_sent_and_well(self, message, admin_client):
        given_up, handled = (message(key="536365", batch={"state": State.SENT}) for _ in range(2))
        for row in (given_up, handled):
            FailedDeliveryFactory(message_id=row.id, consumer_group="points", dead_letter=True)
        OperatorAct.objects.create(message_id=given_up.id, consumer_group="points", act="discarded", acted_by="anna")
        InboxFactory(message_id=given_up.id, consumer_group="points", delivery_count=0)
        InboxFactory(message_id=handled.id, consumer_group="points")

        for page in (admin_client.get(reverse(LIST), {"q": str(given_up.id)}), opened(admin_client, given_up)):
            assert '<span class="outbox-badge outbox-plain">sent</span>' in page.text
            assert '<span class="outbox-badge outbox-bad">discarded by anna for group points</span>' in page.text
        assert '<span class="outbox-badge outbox-good">sent</span>' in opened(admin_client, handled).text

    def test_leads_to_its_row_in_groups_that_have_deferred_it(self, message, admin_client, operator):
        row = message(batch={"state": State.SENT})
        DeferredFactory(message_id=row.id, consumer_group="points", dead=True)
        OperatorAct.objects.create(message_id=row.id, consumer_group="cart", act="discarded", acted_by="anna")
        url = f"{reverse('admin:outbox_deferred_changelist')}?group=points&q={row.id}"

        assert opened(admin_client, row).context["deferred"] == [("points", url)]
        assert opened(operator(VIEW), row).context["deferred"] == []

    def test_marks_markup_and_direction_in_keys_and_errors(self, message, admin_client):
        message(key="<b>\u202e", batch={"state": State.DEAD, "last_error": "<i>\u2066"})

        page = admin_client.get(reverse(LIST)).text

        assert '<bdi>&lt;b&gt;<span class="outbox-odd">U+202E</span></bdi>' in page
        assert '<bdi>&lt;i&gt;<span class="outbox-odd">U+2066</span></bdi>' in page

    def test_finds_a_message_by_id_key_and_the_row_it_is_about(self, message, admin_client):
        row = message(key="536365", about="shop.order:7", batch={"state": State.SENT})
        message(key="other", batch={"state": State.SENT})

        for term in (str(row.id), row.id.hex, "536365", " 536365 ", "shop.order:7"):
            assert admin_client.get(reverse(LIST), {"q": term}).context["cl"].result_list == [row]

    @pytest.mark.parametrize("term", ["5363", "shop.order", "%"])
    def test_guesses_nothing(self, term, message, admin_client):
        message(key="536365", about="shop.order:7", batch={"state": State.SENT})

        assert admin_client.get(reverse(LIST), {"q": term}).context["cl"].result_list == []

    def test_finds_a_row_whose_key_is_written_otherwise(self, message, admin_client):
        row = message(about="shop.order:7")

        assert searched(admin_client, "shop.Order: 07") == [row]

    def test_finds_a_key_that_has_the_form_of_an_id(self, message, admin_client):
        key = message_id()
        row = message(key=str(key))

        assert searched(admin_client, str(key)) == [row]

    def test_looks_for_a_key_before_it_leads_to_the_archive(self, message, admin_client, monkeypatch):
        archive = type("AnArchive", (Extension,), {"has_archive": lambda self: True})
        monkeypatch.setattr("outbox.admin.messages.extensions", lambda: [archive()])
        key, gone = message_id(), message_id()
        row = message(key=str(key))

        assert searched(admin_client, str(key)) == [row]
        assert admin_client.get(reverse(LIST), {"q": str(gone)}).url == reverse(PAGE, args=[gone])

    def test_finds_a_field_of_bodies_with_the_other_filters(self, message, orders, admin_client):
        old = message(id=first_id_at(datetime(2026, 3, 1, tzinfo=UTC)), body=b'{"invoice": "536365"}', batch={"state": 4})
        new = message(body=b'{"customer": {"id": 7}, "invoice": "536365"}', batch={"state": 3})
        message(body=b'{"invoice": "5363651"}', batch={"state": 4})

        assert searched(admin_client, "invoice=536365") == [new, old]
        assert searched(admin_client, "customer.id=7") == searched(admin_client, "invoice=536365", since="day") == [new]
        assert searched(admin_client, "invoice=536365", state="dead") == [old]
        assert searched(admin_client, "invoice=536365", topic="orders", to="2026-03-02T00:00") == [old]
        assert searched(admin_client, "invoice=nix") == searched(admin_client, "a\x00=1") == []

    def test_says_how_far_bodies_were_read_and_goes_on_from_there(self, message, admin_client, monkeypatch):
        monkeypatch.setattr("outbox.monitoring.find.MAX_MESSAGES_READ", 1)
        rows = [message(id=first_id_at(datetime(2026, 3, day, tzinfo=UTC)), body=b'{"a": 1}') for day in (1, 2, 3)]

        page = admin_client.get(reverse(LIST), {"q": "a=1"})
        older = admin_client.get(reverse(LIST) + page.context["cl"].older_url)

        assert page.context["cl"].result_list == [rows[2], rows[1]]
        assert 'only messages since <span class="outbox-time">2026-03-02 00:00:00</span> were read.' in page.text
        assert older.context["cl"].result_list == [rows[0]]
        assert "were read" not in admin_client.get(reverse(LIST), {"q": "a=1", "from": "2026-03-03T00:00"}).text
        assert "were read" not in older.text

    def test_says_that_bodies_took_too_long(self, message, admin_client, monkeypatch):
        monkeypatch.setattr(find, "CANDIDATES", f"SELECT pg_sleep(20) FROM ({find.CANDIDATES}) one")
        monkeypatch.setattr(find, "MAX_SECONDS", 0.0)
        message(body=b'{"a": 1}')

        page = admin_client.get(reverse(LIST), {"q": "a=1"})

        assert page.context["cl"].result_list == []
        assert "The search took longer than 10 s. Choose a shorter time." in page.text

    def test_finds_a_key_in_a_state_however_many_messages_have_it(self, message, admin_client, monkeypatch):
        monkeypatch.setattr("outbox.admin.messages.MAX_COUNTED", 1)
        old = message(key="old", batch={"state": State.DEAD})
        for _ in range(3):
            message(batch={"state": State.DEAD})

        assert searched(admin_client, "old", state="dead") == [old]

    def test_filters_by_topic_and_state(self, orders, message, admin_client):
        waiting = message()
        TicketFactory(topic=orders, message=waiting)
        message(batch={"state": State.SENT})

        shown = admin_client.get(reverse(LIST), {"topic": "orders", "state": "waiting"}).context["cl"].result_list

        assert shown == [waiting]

    def test_knows_which_message_of_a_dead_batch_is_dead(self, orders, message, admin_client):
        first, second = message(), message(batch={"state": State.SENT})
        BatchFactory(topic=orders, message_ids=[first.id, second.id], split=[2], state=State.DEAD)

        assert admin_client.get(reverse(LIST), {"state": "dead"}).context["cl"].result_list == [first]


class TestPage:
    def test_tells_a_message_s_life(self, message, admin_client):
        row = message(
            batch={
                "state": State.SENT,
                "half_ids": ["7"],
                "decided_at": "2026-01-01T12:00:00Z",
                "sent_at": "2026-01-01T12:00:01Z",
            }
        )
        CheckBackFactory(message_id=str(row.id))
        FailedDeliveryFactory(message_id=row.id, error="<KeyError>", traceback="File <x>\n  raise")

        page = opened(admin_client, row)

        assert {one["what"] for one in page.context["moments"]} == {
            "Published",
            "Claimed",
            "Half message sent",
            "Commit decided",
            "Committed",
            "Check-back: COMMIT",
            "Failed",
        }
        assert "&lt;KeyError&gt;" in page.text
        assert "File &lt;x&gt;" in page.text

    def test_changes_nothing(self, message, admin_client):
        row = message()

        answer = admin_client.post(reverse(PAGE, args=[row.id]), {"key": "other"})

        row.refresh_from_db()
        assert (answer.status_code, row.key) == (403, "")

    def test_links_to_the_row_it_is_about(self, message, order, admin_client):
        page = opened(admin_client, message(about=f"shop.order:{order.pk}")).text

        assert f'<a href="{reverse("admin:shop_order_change", args=[order.pk])}">' in page

    def test_says_that_the_row_is_gone(self, message, admin_client):
        assert "(it is gone)" in opened(admin_client, message(about="shop.order:7")).text

    def test_links_to_no_row_that_the_person_may_not_see(self, message, order, operator):
        page = opened(operator(VIEW), message(about=f"shop.order:{order.pk}")).text

        assert f"<bdi>shop.order:{order.pk}</bdi>" in page
        assert "/shop/order/" not in page

    @pytest.mark.parametrize(
        "about", ["nix", "shop.nix:1", "shop.order:abc", "<b>:1", "outbox.inbox:1", "shop.order:" + "9" * 40]
    )
    def test_shows_what_leads_nowhere_as_it_is(self, about, message, admin_client):
        assert opened(admin_client, message(about=about)).status_code == 200

    def test_links_to_the_message_that_caused_it(self, message, admin_client):
        cause = message()
        row = message(headers=json.dumps({"ce-causationid": str(cause.id)}))

        assert f'href="{reverse(PAGE, args=[cause.id])}"' in opened(admin_client, row).text

    @pytest.mark.parametrize("headers", ["{", "[]", '{"ce-type": 7}', "[" * 5_000, '{"ce-causationid": "<nix>"}'])
    def test_survives_headers_that_nobody_wrote_here(self, headers, message, admin_client):
        assert opened(admin_client, message(headers=headers)).status_code == 200

    @pytest.mark.parametrize("body", [b"\x00\xff", b"{", b"[" * 10_000, b'{"a": "\xe2\x80\xae<script>"}', b" "])
    def test_survives_any_body(self, body, message, admin_client):
        page = opened(admin_client, message(body=body, headers='{"content-type": "application/json"}'))

        assert page.status_code == 200
        assert "<script>" not in page.context["body_text"]

    def test_cuts_a_body_of_four_mebibytes(self, message, admin_client):
        row = message(body=b'{"a": "%s"}' % (b"x" * 4 * 1024 * 1024), headers='{"content-type": "application/json"}')

        page = opened(admin_client, row)

        assert "Truncated: the first 64 KiB of 4.0 MiB." in page.text
        assert len(page.content) < 100_000

    def test_asks_the_broker_only_when_told(self, message, admin_client):
        row = message(batch={"state": State.SENT})

        before, after = opened(admin_client, row), admin_client.get(reverse(PAGE, args=[row.id]), {"broker": ""})

        assert "Look it up at default" in before.text
        assert "default does not have it." in after.text


class TestMask:
    BODY = b'{"order_id": 1, "customer": "Ada Lovelace"}'

    def test_hides_a_field_from_whoever_may_view_messages_only(self, masked, message, operator):
        page = opened(operator(VIEW), message(body=self.BODY, headers=masked)).text

        assert "Ada Lovelace" not in page
        assert "&quot;order_id&quot;: 1" in page

    def test_holds_for_a_search_by_a_field(self, masked, message, operator):
        row = message(body=self.BODY, headers=masked)
        message(body=self.BODY, headers=json.dumps({"ce-type": "Gone"}))
        raw = message(body=self.BODY)
        may_view, may_read = operator(VIEW), operator(VIEW, "view_body", name="eve")

        assert searched(may_view, "order_id=1") == [raw, row]
        assert searched(may_view, "customer=Ada Lovelace") == [raw]
        assert len(searched(may_read, "customer=Ada Lovelace")) == 3

    def test_shows_it_to_whoever_may_see_bodies(self, masked, message, operator):
        assert "Ada Lovelace" in opened(operator(VIEW, "view_body"), message(body=self.BODY, headers=masked)).text

    def test_names_a_type_that_is_gone_and_hides_its_body(self, message, operator):
        page = opened(operator(VIEW), message(body=self.BODY, headers='{"ce-type": "OrderGone"}')).text

        assert "No module defines the type OrderGone." in page
        assert "Ada Lovelace" not in page

    def test_holds_for_the_copy_of_a_dead_message_too(self, masked, message, operator):
        row = message()
        DeadMessage.objects.create(message_id=row.id, batch_id=1, topic="orders", body=self.BODY, headers=masked, reason="x")

        page = operator("view_deadmessage").get(reverse("admin:outbox_deadmessage_change", args=[row.id])).text

        assert "Ada Lovelace" not in page


def test_an_inactive_or_common_user_sees_nothing(client, message):
    user = User.objects.create_user("common")
    user.user_permissions.set(Permission.objects.filter(content_type__app_label="outbox"))
    client.force_login(user)

    assert opened(client, message()).status_code == 302
