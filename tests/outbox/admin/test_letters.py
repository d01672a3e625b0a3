import re
from contextlib import closing
from datetime import timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.urls import reverse

from outbox import conf
from outbox.brokers.base import Outgoing
from outbox.brokers.memory.store import forget
from outbox.consuming import dead_letters as room
from outbox.consuming.dead_letters import read_letters, settle_letters
from outbox.errors import BrokerUnavailable
from tests.factories import MessageRowFactory

pytestmark = pytest.mark.django_db

LIST = "admin:outbox_deadletter_changelist"
ALL = ["view_deadletter", "retry_deadletter", "discard_deadletter"]
MEMORY = {"BACKEND": "outbox.brokers.memory.MemoryBroker", "OPTIONS": {"NAME": "letters"}}


@pytest.fixture(autouse=True)
def _memory(settings):
    topics = {name: {"TYPE": "normal"} for name in settings.OUTBOX["TOPICS"]}
    settings.OUTBOX = {"BROKERS": {"default": MEMORY}, "TOPICS": topics}
    forget("letters")


@pytest.fixture
def broker():
    with closing(conf.make_broker("default")) as broker:
        yield broker


@pytest.fixture
def given_up(broker):
    """Have groups give messages up."""

    def given_up(*message_ids, group="cart", topic="orders", reason="KeyError"):
        options = {"limit": 100, "invisible_for": timedelta(minutes=1), "wait": timedelta(0)}
        broker.receive(group, {topic: None}, **options)
        broker.send([Outgoing(message_id, topic, b"{}") for message_id in message_ids])
        for delivery in broker.receive(group, {topic: None}, **options):
            broker.dead_letter(delivery, reason)

    return given_up


def left(group="cart"):
    return [one.letter.message_id for one in read_letters().found if one.letter.group == group]


def names(group="cart"):
    return [one.name for one in read_letters().found if one.letter.group == group]


def confirm(client, page, **filled):
    data = {}
    for name, value in re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', page.text):
        data.setdefault(name, []).append(value.replace("&quot;", '"'))
    return client.post(reverse(LIST), {**data, "reason": "the handler was wrong", **filled}, follow=True)


class TestReadLetters:
    def test_asks_each_group_s_broker(self, given_up):
        given_up("1")
        given_up("2", group="points")

        found = [(one.broker, one.letter.group, one.letter.message_id) for one in read_letters().found]

        assert ("default", "cart", "1") in found
        assert ("default", "points", "2") in found

    def test_says_which_groups_have_more(self, given_up, monkeypatch):
        monkeypatch.setattr(room, "READ_AT_ONCE", 2)
        given_up("1", "2", "3")

        letters = read_letters()

        assert (len([one for one in letters.found if one.letter.group == "cart"]), letters.cut) == (2, ["cart"])

    def test_says_which_broker_lists_none_or_is_away(self, monkeypatch):
        def away(*args, **options):
            raise BrokerUnavailable("nobody answers")

        monkeypatch.setattr("outbox.brokers.memory.MemoryBroker.dead_letters", away)
        assert "Group 'cart': nobody answers" in read_letters().troubles

        monkeypatch.setattr("outbox.brokers.memory.MemoryBroker.supports_replay", False)
        assert read_letters().troubles[0] == (
            "The dead letters of group 'cart' stay with the broker 'default', which does not list them."
        )


class TestSettleLetters:
    def test_gives_those_that_were_still_there(self, given_up):
        given_up("1", "2")
        first, second = names()
        list(settle_letters([first]))

        assert list(settle_letters([first, second], discard=True)) == [second]
        assert left() == []


class TestPage:
    def test_shows_group_topic_attempts_and_reason(self, given_up, operator):
        row = MessageRowFactory()
        given_up(str(row.id), "<b>", reason="<i>\u202e")

        page = operator(*ALL).get(reverse(LIST)).text

        assert reverse("admin:outbox_messagerow_change", args=[row.id]) in page
        assert "<bdi>&lt;b&gt;</bdi>" in page
        assert '<bdi>&lt;i&gt;<span class="outbox-odd">U+202E</span></bdi>' in page

    def test_shows_those_of_a_group_or_topic(self, given_up, operator):
        given_up("1")
        given_up("2", group="points")
        client = operator(*ALL)

        shown = [row["group"] for row in client.get(reverse(LIST), {"group": "points"}).context["rows"]]

        assert set(shown) == {"points"}
        assert client.get(reverse(LIST), {"topic": "\x00%"}).context["rows"] == []


class TestActs:
    def test_deliver_again_what_was_chosen_and_note_who_and_why(self, given_up, operator):
        given_up("1", "2")
        client = operator(*ALL)

        page = client.post(reverse(LIST), {"action": "retry", "letter": names()[:1]})
        answer = confirm(client, page)

        assert list(page.context["counts"]) == [("orders, group cart", 1)]
        assert left() == ["2"]
        assert "To be delivered again: 1." in answer.text
        (entry,) = LogEntry.objects.all()
        assert (entry.user.username, entry.object_repr) == ("ada", "1 in group cart")
        assert entry.get_change_message() == "To be delivered again. Reason: the handler was wrong"

    def test_discard_all_that_are_listed(self, given_up, operator):
        given_up("1", "2")
        given_up("3", group="points")
        client = operator(*ALL)
        url = f"{reverse(LIST)}?group=cart"

        page = client.post(url, {"action": "discard", "all": "1"})
        data = {"action": "discard", "all": "1", "reason": "x", "as_of": page.context["form"]["as_of"].value(), "shown": "2"}
        client.post(url, data)

        assert left() == []
        assert left("points") != []

    def test_do_nothing_twice(self, given_up, operator):
        given_up("1")
        client = operator(*ALL)
        page = client.post(reverse(LIST), {"action": "retry", "letter": names()})
        confirm(client, page)

        stale = confirm(client, page)

        assert "Nothing was done about 1: somebody has settled them before." in stale.text
        assert LogEntry.objects.count() == 1

    def test_note_what_was_done_before_the_broker_went_away(self, given_up, operator, monkeypatch):
        given_up("1", "2")
        client = operator(*ALL)
        page = client.post(reverse(LIST), {"action": "retry", "letter": names()})
        replay = type(conf.make_broker("default")).replay
        calls = []

        def away(self, group, letters):
            calls.append(letters)
            if len(calls) == 2:
                raise BrokerUnavailable("nobody answers")
            return replay(self, group, letters)

        monkeypatch.setattr("outbox.brokers.memory.MemoryBroker.replay", away)

        answer = confirm(client, page)

        assert "The broker is out of reach: nobody answers" in answer.text
        assert LogEntry.objects.count() == 1
        assert len(left()) == 1

    def test_want_something_chosen(self, operator):
        answer = operator(*ALL).post(reverse(LIST), {"action": "retry"}, follow=True)

        assert "Choose some dead letters first." in answer.text

    @pytest.mark.parametrize("letter", ["", "x", "[]", '["nix", "cart", "1"]', "\x00"])
    def test_find_nothing_by_a_wild_name(self, letter, given_up, operator):
        given_up("1")

        answer = operator(*ALL).post(reverse(LIST), {"action": "discard", "letter": letter}, follow=True)

        assert answer.status_code == 200
        assert left() == ["1"]

    @pytest.mark.parametrize("act", ["retry", "discard"])
    def test_are_hidden_and_forbidden_without_their_permission(self, act, given_up, operator):
        given_up("1")
        client = operator("view_deadletter", *({"retry_deadletter", "discard_deadletter"} - {f"{act}_deadletter"}))

        offered = client.get(reverse(LIST)).text
        answer = client.post(reverse(LIST), {"action": act, "all": "1", "reason": "x", "as_of": "2099-01-01", "shown": "1"})

        assert (answer.status_code, left()) == (403, ["1"])
        assert f'<option value="{act}">' not in offered
