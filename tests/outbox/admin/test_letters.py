import re
from contextlib import closing
from datetime import timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.urls import resolve, reverse

from outbox import conf
from outbox.brokers.base import Outgoing
from outbox.brokers.memory import MemoryBroker
from outbox.brokers.memory.store import forget
from outbox.consuming import dead_letters as room
from outbox.consuming.dead_letters import group_letters, read_ends, read_letters, settle_letters
from outbox.consuming.delivery_info import uuid_of
from outbox.errors import BrokerUnavailable
from outbox.models import Act, OperatorAct, State
from outbox.testing.factories import FailedDeliveryFactory, InboxFactory
from tests.factories import BatchFactory, MessageRowFactory, message_id

pytestmark = pytest.mark.django_db

LIST = "admin:outbox_deadletter_changelist"
ALL = ["view_deadletter", "replay_deadletter", "discard_deadletter"]
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
    """Make groups give messages up."""

    def given_up(*message_ids, group="cart", topic="orders", reason="KeyError"):
        options = {"limit": 100, "invisible_for": timedelta(minutes=1), "wait": timedelta(0)}
        broker.receive(group, {topic: None}, **options)
        broker.send([Outgoing(message_id, topic, b"{}") for message_id in message_ids])
        for delivery in broker.receive(group, {topic: None}, **options):
            broker.dead_letter(delivery, reason)

    return given_up


def left(group="cart"):
    return [one.letter.message_id for one in read_letters().found if one.letter.group == group]


def of_cart():
    return [one for one in read_letters().found if one.letter.group == "cart"]


def names():
    return [one.name for one in of_cart()]


def acts():
    """What was done by hand: message, outcome, who, why."""
    known = {uuid_of(text): text for text in "12345"}
    rows = OperatorAct.objects.order_by("id")
    return [(known[row.message_id], row.act, row.acted_by, row.reason) for row in rows]


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
        first, second = of_cart()
        list(settle_letters([first], by="ada"))

        assert list(settle_letters([first, second], by="ada", discard=True)) == [second]
        assert left() == []

    def test_asks_the_broker_for_a_portion_at_a_time(self, given_up, monkeypatch):
        given_up(*"12345")
        asked = []
        discard = MemoryBroker.discard

        def note(self, group, letters):
            asked.append((len(letters), [outcome for _, outcome, _, _ in acts()]))
            return discard(self, group, letters)

        monkeypatch.setattr(MemoryBroker, "discard", note)
        monkeypatch.setattr(room, "SETTLED_AT_ONCE", 3)

        settled = list(settle_letters(of_cart(), by="ada", discard=True))

        assert [one.letter.message_id for one in settled] == list("12345")
        assert asked == [(3, ["discard asked"] * 3), (2, ["discarded"] * 3 + ["discard asked"] * 2)]

    def test_writes_down_who_did_what_and_why(self, given_up):
        given_up("1", "2")
        first, second = of_cart()

        list(settle_letters([first], by="ada", reason="mended"))
        list(settle_letters([second], by="ada", reason="a test order", discard=True))

        assert acts() == [("1", "replayed", "ada", "mended"), ("2", "discarded", "ada", "a test order")]

    def test_writes_down_nothing_where_somebody_was_faster(self, given_up):
        given_up("1")
        letters = of_cart()
        list(settle_letters(letters, by="ada"))

        list(settle_letters(letters, by="bea", discard=True))

        assert [by for _, _, by, _ in acts()] == ["ada"]

    def test_leaves_a_trace_behind_where_it_dies_in_the_act(self, given_up, monkeypatch):
        given_up("1")
        letters = of_cart()

        def die(self, group, letters):
            assert acts() == [("1", "discard asked", "ada", "")]
            raise SystemExit(137)

        monkeypatch.setattr("outbox.brokers.memory.MemoryBroker.discard", die)
        with pytest.raises(SystemExit):
            list(settle_letters(letters, by="ada", discard=True))

        assert acts() == [("1", "discard asked", "ada", "")]

    def test_writes_the_number_down_by_which_the_group_knows_the_message(self, given_up):
        place = {"source": "urn:shop", "lane": 2, "number": 17}
        FailedDeliveryFactory(consumer_group="cart", message_id=uuid_of("1"), topic="orders", dead_letter=True, **place)
        given_up("1")

        list(settle_letters(of_cart(), by="ada", discard=True))

        assert OperatorAct.objects.filter(act="discarded").values("source", "lane", "number").get() == place

    def test_asks_the_outbox_for_the_number_where_no_failure_is_on_record(self, given_up, orders):
        row = MessageRowFactory(topic=orders)
        BatchFactory(topic=orders, message_ids=[row.id], state=State.SENT, lane=3, first_seq=9)
        given_up(str(row.id))

        list(settle_letters(of_cart(), by="ada", discard=True))

        assert OperatorAct.objects.values_list("lane", "number").get() == (3, 9)


class TestReadEnds:
    def test_says_how_a_message_ended_in_groups_that_have_not_handled_it(self):
        one = message_id()
        for group, outcomes in {
            "cart": ["retry", "dead letter", "replayed", "dead letter", "discarded"],
            "points": ["dead letter", "replayed"],
            "mail": ["retry"],
            "stock": ["dead letter", "discarded"],
        }.items():
            for outcome in outcomes:
                if outcome in Act:
                    OperatorAct.objects.create(act=outcome, consumer_group=group, message_id=one, acted_by="ada")
                else:
                    FailedDeliveryFactory(consumer_group=group, message_id=one, outcome=outcome)
        InboxFactory(consumer_group="stock", message_id=one)

        ends = read_ends([one], "default")[one]

        assert [(end.group, end.outcome) for end in ends] == [("cart", "discarded"), ("points", "replayed")]


class TestGroupLetters:
    def test_counts_what_looks_alike(self, given_up):
        given_up("1", "2", reason="order 17 is not known")
        given_up("3", reason="order 18 is not known")
        given_up("4", reason="KeyError: 'total'")
        given_up("5", group="points", reason="order 19 is not known")

        kinds = group_letters(one for one in read_letters().found if one.letter.message_id in "12345")

        found = [(one.count, one.group, one.fingerprint) for one in kinds if one.reason]
        assert found[:1] == [(3, "cart", "order # is not known")]
        assert (1, "cart", "KeyError: 'total'") in found
        assert kinds[0].first_at < kinds[0].last_at

    def test_goes_by_the_error_of_the_handler_where_it_is_on_record(self, given_up):
        FailedDeliveryFactory(consumer_group="cart", message_id=uuid_of("1"), topic="orders", dead_letter=True)
        given_up("1", reason="attempt 3: ValueError: no such customer")

        (kind,) = group_letters(of_cart())

        assert kind.fingerprint == "ValueError in shop.consumers.add_points: no such customer"


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

    def test_counts_them_by_error_and_leads_to_each_kind(self, given_up, operator):
        given_up("1", "2", reason="order 17 is not known")
        given_up("3", reason="no total")
        client = operator(*ALL)

        kinds = client.get(reverse(LIST), {"group": "cart"}).context["kinds"]
        of_kind = client.get(reverse(LIST) + kinds[0]["url"]).context["rows"]

        assert [kind["count"] for kind in kinds] == [2, 1]
        assert [row["reason"] for row in of_kind] == ["<bdi>order 17 is not known</bdi>"] * 2

    def test_shows_those_of_a_time(self, given_up, operator):
        given_up("1")
        client = operator(*ALL)

        def count(**asked):
            return client.get(reverse(LIST), {"group": "cart", **asked}).context["count"]

        assert count(since="hour") == count(**{"from": "2020-01-01T00:00"}) == 1
        assert count(to="2020-01-01T00:00") == count(**{"from": "2920-01-01T00:00"}) == 0
        assert client.get(reverse(LIST), {"from": "yesterday"}).status_code == 302

    def test_has_pages(self, given_up, operator, monkeypatch):
        monkeypatch.setattr("outbox.admin.letters.PER_PAGE", 2)
        given_up("1", "2", "3")

        second = operator(*ALL).get(reverse(LIST), {"group": "cart", "p": "2"})

        assert (len(second.context["rows"]), second.context["count"]) == (1, 3)
        assert '<a href="?group=cart&amp;p=1">1</a>' in second.text


class TestActs:
    def test_deliver_again_what_was_chosen_and_note_who_and_why(self, given_up, operator):
        given_up("1", "2")
        client = operator(*ALL)

        page = client.post(reverse(LIST), {"action": "replay", "letter": names()[:1]})
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

    def test_are_about_all_that_match_not_only_those_of_the_page(self, given_up, operator, monkeypatch):
        monkeypatch.setattr("outbox.admin.letters.PER_PAGE", 1)
        given_up("1", "2", reason="no total")
        given_up("3", reason="no customer")
        client = operator(*ALL)
        url = f"{reverse(LIST)}?group=cart&error=no+total"

        page = client.post(url, {"action": "discard", "all": "1"})
        data = {"action": "discard", "all": "1", "reason": "x", "as_of": page.context["form"]["as_of"].value(), "shown": "2"}
        client.post(url, data)

        assert "This cannot be undone" in page.text
        assert page.context["notes"] == ["2 of group cart: no total"]
        assert left() == ["3"]

    def test_stay_out_of_the_transaction_of_the_request(self):
        view = resolve(reverse(LIST)).func

        assert "default" in view._non_atomic_requests

    def test_do_nothing_twice(self, given_up, operator):
        given_up("1")
        client = operator(*ALL)
        page = client.post(reverse(LIST), {"action": "replay", "letter": names()})
        confirm(client, page)

        stale = confirm(client, page)

        assert "1 were not changed: another user or command has settled them before." in stale.text
        assert LogEntry.objects.count() == 1

    def test_note_what_was_done_before_the_broker_went_away(self, given_up, operator, monkeypatch):
        given_up("1", "2")
        monkeypatch.setattr(room, "SETTLED_AT_ONCE", 1)
        client = operator(*ALL)
        page = client.post(reverse(LIST), {"action": "replay", "letter": names()})
        replay = type(conf.make_broker("default")).replay
        calls = []

        def away(self, group, letters):
            calls.append(letters)
            if len(calls) == 2:
                raise BrokerUnavailable("nobody answers")
            return replay(self, group, letters)

        monkeypatch.setattr("outbox.brokers.memory.MemoryBroker.replay", away)

        answer = confirm(client, page)

        assert "The broker cannot be reached: nobody answers" in answer.text
        assert LogEntry.objects.count() == 1
        assert len(left()) == 1

    def test_want_something_chosen(self, operator):
        answer = operator(*ALL).post(reverse(LIST), {"action": "replay"}, follow=True)

        assert "Choose some dead letters first." in answer.text

    @pytest.mark.parametrize("letter", ["", "x", "[]", '["nix", "cart", "1"]', "\x00"])
    def test_find_nothing_by_a_wild_name(self, letter, given_up, operator):
        given_up("1")

        answer = operator(*ALL).post(reverse(LIST), {"action": "discard", "letter": letter}, follow=True)

        assert answer.status_code == 200
        assert left() == ["1"]

    @pytest.mark.parametrize("act", ["replay", "discard"])
    def test_are_hidden_and_forbidden_without_their_permission(self, act, given_up, operator):
        given_up("1")
        client = operator("view_deadletter", *({"replay_deadletter", "discard_deadletter"} - {f"{act}_deadletter"}))

        offered = client.get(reverse(LIST)).text
        answer = client.post(reverse(LIST), {"action": act, "all": "1", "reason": "x", "as_of": "2099-01-01", "shown": "1"})

        assert (answer.status_code, left()) == (403, ["1"])
        assert f'<option value="{act}">' not in offered
