import re
from datetime import timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from outbox.models import Batch, DeadMessage, MessageRow, MessageState, State
from tests.factories import BatchFactory, MessageRowFactory, TopicFactory

pytestmark = pytest.mark.django_db

LIST = "admin:outbox_deadmessage_changelist"
ALL = ["view_deadmessage", "replay_deadmessage", "discard_deadmessage"]


@pytest.fixture
def dead(orders):
    """Make dead messages, each in a batch of its own, with their copies."""

    def dead(count=1, topic=orders, **copy):
        rows = MessageRow.objects.bulk_create(MessageRowFactory.build_batch(count, topic=topic))
        fields = {"topic": topic.name, "reason": "refused", "body": b"{}", "key": "k", **copy}
        copies = []
        for row in rows:
            batch = BatchFactory(topic=topic, message_ids=[row.id], state=State.DEAD, failures=3, last_error="refused")
            copies.append(DeadMessage(message_id=row.id, batch_id=batch.id, **fields))
        DeadMessage.objects.bulk_create(copies)
        return rows

    return dead


@pytest.fixture
def client(operator):
    return operator(*ALL)


def choose(client, action, rows, *, everything=False, query=""):
    data = {
        "action": action,
        "_selected_action": [str(row.id) for row in rows],
        "select_across": str(int(everything)),
        "index": "0",
    }
    return client.post(reverse(LIST) + query, data)


def confirm(client, page, query="", **filled):
    """Send the form of the impact page as a browser would, filled in."""
    fields = re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', page.text)
    data = {}
    for name, value in fields:
        data.setdefault(name, []).append(value)
    return client.post(reverse(LIST) + query, {**data, "reason": "the broker was wrong", **filled}, follow=True)


def states(rows):
    states = dict(MessageState.objects.filter(id__in=[row.id for row in rows]).values_list("id", "state"))
    return [states[row.id] for row in rows]


class TestImpactPage:
    def test_counts_by_topic_before_anything_is_done(self, dead, client):
        rows = dead(3)

        page = choose(client, "replay", rows)

        assert list(page.context["counts"]) == [("orders", 3)]
        assert states(rows) == ["dead"] * 3
        assert LogEntry.objects.count() == 0

    def test_requires_a_reason(self, dead, client):
        rows = dead()

        page = confirm(client, choose(client, "replay", rows), reason=" ")

        assert "This field is required." in page.text
        assert states(rows) == ["dead"]

    @pytest.mark.parametrize("typed", ["", "100", "all"])
    def test_has_the_number_typed_over_a_hundred(self, typed, dead, client):
        rows = dead(101)

        page = confirm(client, choose(client, "replay", rows[:1], everything=True), typed=typed)

        assert "There are 101. Type that number." in page.text
        assert set(states(rows)) == {"dead"}

    def test_is_protected_against_other_sites(self, dead, client):
        rows = dead()
        strict = Client(enforce_csrf_checks=True)
        strict.cookies = client.cookies

        assert choose(strict, "replay", rows).status_code == 403


class TestRetry:
    def test_releases_what_was_chosen_and_notes_who_and_why(self, dead, client):
        one, other = dead(2)

        page = confirm(client, choose(client, "replay", [one]))

        assert states([one, other]) == ["released", "dead"]
        assert "Released, to be sent again: 1." in page.text
        (entry,) = LogEntry.objects.all()
        assert (entry.user.username, entry.object_id) == ("ada", str(one.id))
        assert entry.get_change_message() == "Released, to be sent again. Reason: the broker was wrong"

    def test_releases_all_that_match_the_filter_on_all_pages(self, dead, orders, client):
        rows, others = dead(120), dead(2, topic=TopicFactory(name="other"))
        page = choose(client, "replay", rows[:1], everything=True, query="?topic=orders")

        confirm(client, page, query="?topic=orders", typed="120")

        assert set(states(rows)) == {"released"}
        assert set(states(others)) == {"dead"}
        assert LogEntry.objects.count() == 120

    def test_leaves_those_alone_that_died_after_the_person_looked(self, dead, client):
        rows = dead(2)
        page = choose(client, "replay", rows, everything=True)
        later = dead(died_at=timezone.now() + timedelta(seconds=5))

        confirm(client, page)

        assert states([*rows, *later]) == ["released", "released", "dead"]

    def test_does_a_bounded_number_at_once(self, dead, client, monkeypatch):
        monkeypatch.setattr("outbox.admin.dead.MAX_PER_REQUEST", 2)
        rows = dead(3)

        page = confirm(client, choose(client, "replay", rows))

        assert sorted(states(rows)) == ["dead", "released", "released"]
        assert "1 are left. Repeat the action for these." in page.text

    def test_tells_the_message_s_page_who_did_it_and_why(self, dead, client, admin_client):
        (row,) = dead()
        confirm(client, choose(client, "replay", [row]))

        moments = admin_client.get(reverse("admin:outbox_messagerow_change", args=[row.id])).context["moments"]

        (told,) = [one for one in moments if one["what"] == "Replayed"]
        assert (told["by"], told["text"]) == ("<bdi>ada</bdi>", "<bdi>the broker was wrong</bdi>")


class TestDiscard:
    def test_lets_messages_rest(self, dead, client):
        rows = dead(2)

        confirm(client, choose(client, "discard", rows))

        assert states(rows) == ["discarded"] * 2


class TestTwoOperators:
    def test_do_nothing_twice(self, dead, client):
        rows = dead(2)
        page = choose(client, "replay", rows)
        confirm(client, page)
        Batch.objects.update(state=State.SENT)

        stale = confirm(client, page)

        assert states(rows) == ["sent"] * 2
        assert "2 were not changed: another user or command has settled them, or they are being handled." in stale.text
        assert LogEntry.objects.count() == 2

    def test_hear_of_what_the_other_was_faster_with(self, dead, client):
        one, other = dead(2)
        page = choose(client, "discard", [one, other])
        confirm(client, choose(client, "replay", [one]))

        answer = confirm(client, page)

        assert states([one, other]) == ["released", "discarded"]
        assert "Discarded: 1." in answer.text
        assert "1 were not changed: another user or command has settled them, or they are being handled." in answer.text

    @pytest.mark.parametrize("query", ["", "?settled=all"])
    def test_hear_at_once_when_nothing_is_dead_any_more(self, query, dead, client):
        rows = dead()
        Batch.objects.update(state=State.SENT)
        data = {"action": "replay", "_selected_action": [str(rows[0].id)], "index": "0"}

        answer = client.post(reverse(LIST) + query, data, follow=True)

        assert "Nothing was changed: none of them is in that state any more." in answer.text


class TestPermissions:
    @pytest.mark.parametrize("act", ["replay", "discard"])
    def test_hide_the_act_and_forbid_it(self, act, dead, operator):
        rows = dead()
        client = operator("view_deadmessage", *({"replay_deadmessage", "discard_deadmessage"} - {f"{act}_deadmessage"}))
        data = {
            "action": act,
            "_selected_action": [str(rows[0].id)],
            "reason": "x",
            "as_of": timezone.now().isoformat(),
            "shown": "1",
        }

        offered = client.get(reverse(LIST)).text
        client.post(reverse(LIST), {**data, "index": "0"})

        assert f'<option value="{act}">' not in offered
        assert states(rows) == ["dead"]
        assert LogEntry.objects.count() == 0

    def test_are_needed_to_look(self, dead, operator):
        (row,) = dead()
        client = operator("replay_deadmessage", "discard_deadmessage")

        pages = [
            client.get(reverse(LIST)),
            client.post(reverse(LIST), {"action": "replay", "_selected_action": [str(row.id)], "index": "0"}),
        ]
        pages.append(client.get(reverse("admin:outbox_deadmessage_change", args=[row.id])))

        assert [page.status_code for page in pages] == [403, 403, 403]
        assert states([row]) == ["dead"]


class TestList:
    def test_shows_what_is_dead_still_and_on_demand_the_rest(self, dead, client):
        one, other = dead(2)
        Batch.objects.filter(message_ids=[other.id]).update(state=State.SENT)

        shown = {
            value: {row.message_id for row in client.get(reverse(LIST), value and {"settled": value}).context["cl"].result_list}
            for value in ("", "yes", "all")
        }

        assert shown == {"": {one.id}, "yes": {other.id}, "all": {one.id, other.id}}

    def test_shows_reasons_escaped(self, dead, client):
        dead(reason="<b>\u202e")

        assert '<bdi>&lt;b&gt;<span class="outbox-odd">U+202E</span></bdi>' in client.get(reverse(LIST)).text

    def test_is_searched_by_id_and_key(self, dead, client):
        (row,) = dead(key="536365")
        dead()

        for term in (str(row.id), "536365"):
            assert [one.message_id for one in client.get(reverse(LIST), {"q": term}).context["cl"].result_list] == [row.id]


class TestPage:
    def test_shows_a_copy_whose_message_is_gone(self, dead, client):
        (row,) = dead(body=b'{"a": 1}', headers='{"content-type": "application/json"}')
        url = reverse("admin:outbox_deadmessage_change", args=[row.id])
        row.delete()

        page = client.get(url).text

        assert "refused" in page
        assert "&quot;a&quot;: 1" in page

    def test_shows_a_copy_without_a_body(self, dead, client):
        (row,) = dead(body=None)

        assert client.get(reverse("admin:outbox_deadmessage_change", args=[row.id])).status_code == 200
