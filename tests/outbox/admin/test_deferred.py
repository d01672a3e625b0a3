import re
from datetime import UTC, datetime, timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.urls import reverse

from outbox import consumer
from outbox.consuming.acts import DeferredState
from outbox.consuming.deferred import HELD
from outbox.models import Deferred, Inbox, OperatorAct, Process
from outbox.testing.factories import DeferredFactory
from tests.factories import MessageRowFactory, stored

pytestmark = pytest.mark.django_db

LIST = reverse("admin:outbox_deferred_changelist")
ALL = ["view_deferred", "replay_deferred", "discard_deferred"]


def listed(page):
    return sorted(row.own_id for row in page.context["cl"].result_list)


def badges(page, row):
    """Return the words of the badges in a row of the list."""
    return re.findall(r'class="outbox-badge [^"]*">([^<]*)<', str(page.context["cl"].model_admin.state(row)))


def choose(client, act, *rows, url=LIST, **data):
    """Choose an act about rows in the list; return the page that asks for a reason."""
    data |= {"action": act, "_selected_action": [row.pk for row in rows], "index": "0"}
    return client.post(url, data)


def confirm(client, page, url=LIST, **filled):
    data = {}
    for name, value in re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', page.text):
        data.setdefault(name, []).append(value)
    return client.post(url, {**data, "reason": "the handler was wrong", **filled}, follow=True)


class TestTheList:
    def test_shows_group_topic_state_and_error(self, operator):
        DeferredFactory(dead=True, own_id="m-1", key="536365", type="shop.Order")
        DeferredFactory(waiting=True, reason="stop")

        page = operator("view_deferred").get(LIST)

        for text in ("points", "orders", "536365", "shop.Order", "ValueError: no such customer", ">dead<", ">waiting<", "stop"):
            assert text in page.text

    @pytest.mark.parametrize(
        ("query", "found"),
        [
            ({"group": "cart"}, ["a"]),
            ({"topic": "bills"}, ["b"]),
            ({"type": "shop.Order"}, ["c"]),
            ({"reason": "stop"}, ["d"]),
            ({"error": "KeyError in add"}, ["e"]),
            ({"state": "dead"}, ["e"]),
            ({"state": "asleep"}, ["f"]),
            ({"state": "held"}, ["g"]),
            ({"since": "hour"}, ["a", "b", "c", "d", "e", "f", "g"]),
            ({"q": "the key"}, ["c"]),
            ({"q": "d"}, ["d"]),
            ({"group": "nobody"}, []),
        ],
    )
    def test_is_filtered(self, query, found, operator):
        DeferredFactory(own_id="a", consumer_group="cart")
        DeferredFactory(own_id="b", topic="bills")
        DeferredFactory(own_id="c", type="shop.Order", key="the key")
        DeferredFactory(own_id="d", reason="stop")
        DeferredFactory(own_id="e", dead=True, fingerprint="KeyError in add")
        DeferredFactory(own_id="f", asleep=True)
        DeferredFactory(own_id="g", held=True)
        DeferredFactory(
            own_id="old", deferred_at=datetime.now(UTC) - timedelta(days=2), type="old", consumer_group="old", topic="old"
        )

        assert listed(operator("view_deferred").get(LIST, query)) == found

    def test_names_the_states_by_which_each_is_found(self, operator):
        of_no_handler = {"no_code_since": datetime.now(UTC)}
        DeferredFactory(own_id="due")
        DeferredFactory(own_id="waiting", waiting=True)
        DeferredFactory(own_id="asleep, in doubt", asleep=True, crashes=1)
        DeferredFactory(own_id="held, no handler", held=True, **of_no_handler)
        DeferredFactory(own_id="due, in doubt, no handler", crashes=1, **of_no_handler)
        DeferredFactory(own_id="running", waiting=True, crashes=1)
        DeferredFactory(own_id="dead", dead=True, crashes=1, **of_no_handler)
        handling = {"topic": "orders", "message_id": "running", "handler": "add", "seconds": 7.0, "limit_seconds": None}
        Process.objects.create(kind="consumer", consumer_group="points", host="shop", pid=7, handling=handling)
        client = operator("view_deferred")

        page = client.get(LIST)
        named = {row.own_id: badges(page, row) for row in page.context["cl"].result_list}
        found = {state: listed(client.get(LIST, {"state": state})) for state in DeferredState}

        assert {own_id: ", ".join(states) for own_id, states in named.items()} == {own_id: own_id for own_id in named}
        for state in ("waiting", "in doubt"):
            found[state].remove("running")  # it is that, too, until its run ends
        assert found == {state: sorted(own_id for own_id in named if state in own_id.split(", ")) for state in DeferredState}

    def test_counts_them_by_group_error_and_key(self, operator):
        DeferredFactory.create_batch(3, dead=True, body=b"x" * 1000, headers="{}")
        DeferredFactory.create_batch(2, asleep=True, order_key="points orders ada", key="ada")
        DeferredFactory(due_at=datetime.now(UTC) - timedelta(minutes=5))

        page = operator("view_deferred").get(LIST)

        [(count, late, _)] = page.context["groups"]
        assert (count.waiting, count.asleep, count.dead, late) == (3, 2, 3, "5 min")
        kinds = [(kind["count"], kind["reason"], kind["url"]) for kind in page.context["kinds"]]
        error = "error=ValueError+in+shop.consumers.add_points%3A+no+such+customer"
        assert kinds[0] == (3, "failed", f"?group=points&topic=orders&reason=failed&{error}")
        assert [(group, topic, number) for group, topic, _, number in page.context["keys"]] == [("points", "orders", 2)]

    def test_says_who_runs_a_message(self, operator):
        DeferredFactory(own_id="m-1", waiting=True)
        handling = {"topic": "orders", "message_id": "m-1", "handler": "add", "seconds": 7.0, "limit_seconds": None}
        Process.objects.create(kind="consumer", consumer_group="points", host="shop", pid=7, handling=handling)

        page = operator("view_deferred").get(LIST, {"state": "running"})

        assert "shop:7, for 7.0 s" in page.text
        assert listed(page) == ["m-1"]

    def test_shows_markup_as_text(self, operator):
        DeferredFactory(dead=True, own_id="<b>", key="<i>", error="<u>", type="<s>")

        page = operator("view_deferred").get(LIST).text

        assert not re.search("<bdi><[bius]>", page)


class TestAPage:
    def test_shows_a_message_and_leads_to_its_row(self, operator):
        message = MessageRowFactory()
        row = DeferredFactory(dead=True, message_id=message.id, body=b'{"total": 4711}')

        client = operator("view_deferred", "view_body", "view_messagerow")
        page = client.get(re.search(rf'href="([^"]*/{row.pk}/change/[^"]*)"', client.get(LIST).text)[1])

        for text in ("ValueError: no such customer", "4711", reverse("admin:outbox_messagerow_change", args=[message.id])):
            assert text in page.text

    @pytest.mark.parametrize("key", ["0", "x"])
    def test_is_none_of_a_row_that_is_gone(self, key, operator):
        assert operator("view_deferred").get(reverse("admin:outbox_deferred_change", args=[key])).status_code == 302


class TestActs:
    def test_replay_what_was_chosen_and_note_who_and_why(self, operator):
        row, other = DeferredFactory(dead=True), DeferredFactory(dead=True)
        client = operator(*ALL, name="ada")

        page = choose(client, "replay", row)
        assert "<strong>1</strong> is affected" in page.text
        assert "1 of group points: failed ValueError in shop.consumers.add_points" in page.text
        answer = confirm(client, page)

        assert "Replayed: 1." in answer.text
        assert (stored(row).dead_at, stored(other).dead_at is None) == (None, False)
        act = OperatorAct.objects.get()
        assert (act.act, act.acted_by, act.reason) == ("replayed", "ada", "the handler was wrong")
        entry = LogEntry.objects.get()
        assert (entry.object_id, entry.change_message) == (str(row.pk), "Replayed. Reason: the handler was wrong")

    def test_hold_and_retry_now(self, operator):
        row = DeferredFactory(waiting=True)
        client = operator(*ALL)

        confirm(client, choose(client, "hold", row))
        assert stored(row).due_at == HELD

        confirm(client, choose(client, "retry_now", row))
        assert stored(row).due_at <= datetime.now(UTC)

    def test_discard_all_that_the_filter_shows(self, operator):
        kept = DeferredFactory(waiting=True)
        rows = DeferredFactory.create_batch(120, dead=True)
        client, url = operator(*ALL), f"{LIST}?state=dead"

        page = choose(client, "discard", rows[0], url=url, select_across="1")
        assert "Type 120 to confirm" in page.text
        assert Deferred.objects.count() == 121
        answer = confirm(client, page, url=url, typed="120")

        assert "Discarded: 120." in answer.text
        assert Deferred.objects.get() == kept
        assert Inbox.objects.filter(delivery_count=0).count() == 120

    def test_leave_messages_alone_that_came_since(self, operator):
        row = DeferredFactory(dead=True)
        client = operator(*ALL)

        page = choose(client, "discard", row, select_across="1")
        since = DeferredFactory(dead=True)
        confirm(client, page)

        assert Deferred.objects.get() == since

    def test_leave_them_alone_although_the_clock_of_the_web_host_is_ahead(self, operator, monkeypatch):
        row = DeferredFactory(dead=True)
        client = operator(*ALL)
        monkeypatch.setattr("django.utils.timezone.now", lambda: datetime.now(UTC) + timedelta(minutes=1))

        page = choose(client, "discard", row, select_across="1")
        since = DeferredFactory(dead=True)
        confirm(client, page)

        assert Deferred.objects.get() == since

    def test_do_nothing_twice(self, operator):
        row = DeferredFactory(dead=True)
        client = operator(*ALL)
        page = choose(client, "replay", row)
        confirm(client, page)

        answer = confirm(client, page)

        assert "1 were not changed" in answer.text
        assert OperatorAct.objects.count() == 1

    @pytest.mark.parametrize(
        ("act", "permission"), [("replay", "replay"), ("hold", "replay"), ("retry_now", "replay"), ("discard", "discard")]
    )
    def test_need_their_permission(self, act, permission, operator):
        row = DeferredFactory(dead=True)
        client = operator(*(name for name in ALL if name != f"{permission}_deferred"))

        assert f'<option value="{act}">' not in client.get(LIST).text
        choose(client, act, row, reason="why", as_of=datetime.now(UTC).isoformat(), shown="1")

        assert stored(row).dead_at
        assert not OperatorAct.objects.exists()


@pytest.mark.django_db(databases=["default", "other"])
class TestSeveralDatabases:
    @pytest.fixture(autouse=True)
    def _groups(self, no_consumers):
        consumer(topic="orders", group="points", using="other")(lambda message, context: None)

    def test_are_chosen_by_a_filter(self, operator):
        DeferredFactory(own_id="here")
        row = DeferredFactory._meta.model.objects.using("other").create(
            consumer_group="points", message_id=MessageRowFactory.build().id, own_id="there", idempotency_key="there",
            topic="orders", headers="{}", body=b"", delivery_count=1, reason="failed", dead_at=datetime.now(UTC),
        )  # fmt: skip
        client, url = operator(*ALL), f"{LIST}?database=other"

        assert listed(client.get(LIST)) == ["here"]
        assert listed(client.get(url)) == ["there"]
        confirm(client, choose(client, "replay", row, url=url), url=url)

        row.refresh_from_db()
        assert row.dead_at is None
        assert OperatorAct.objects.using("other").get().act == "replayed"
