import json
import os
import uuid
from contextlib import suppress
from datetime import timedelta
from importlib import import_module

import pytest
from django.core.management import CommandError, call_command

from outbox import conf, consumer
from outbox.brokers.base import Outgoing
from outbox.brokers.memory import MemoryBroker
from outbox.errors import BrokerUnavailable
from outbox.management.actor import actor
from outbox.models import FailedDelivery, OperatorAct

register = import_module("outbox.consuming.register")
letters = import_module("outbox.consuming.dead_letters")

pytestmark = pytest.mark.django_db

TOPICS = ("orders", "bills")
MINUTE = timedelta(minutes=1)


@pytest.fixture
def broker(settings, monkeypatch):
    """A broker whose groups cart and points gave up one message each of each topic: o-cart, b-cart, o-points, b-points."""
    options = {"NAME": uuid.uuid4().hex}
    settings.OUTBOX = {
        "BROKERS": {"default": {"BACKEND": "outbox.brokers.memory.MemoryBroker", "OPTIONS": options}},
        "TOPICS": {name: {"TYPE": "normal"} for name in TOPICS},
    }
    monkeypatch.setattr(register, "registered", {})
    broker = conf.make_broker("default")
    for group in ("cart", "points"):
        for topic in TOPICS:
            consumer(topic=topic, group=group)(lambda message, context: None)
            broker.send([Outgoing(f"{topic[0]}-{group}", topic, b"1")])
    for group in ("cart", "points"):
        for delivery in broker.receive(group, dict.fromkeys(TOPICS), limit=10, invisible_for=MINUTE, wait=timedelta(0)):
            if delivery.message_id.endswith(group):
                broker.dead_letter(delivery, f"{group} cannot\n" + "handle it " * 20)
            else:
                broker.ack([delivery])
    return broker


def replay(*arguments):
    """Run the command; return its exit code."""
    try:
        call_command("outbox_replay_unhandled", *arguments)
    except SystemExit as end:
        return end.code
    return 0


def dead(broker):
    return sorted(letter.message_id for group in ("cart", "points") for letter in broker.dead_letters(group))


class TestAGroupWhoseCodeIsGone:
    @pytest.fixture(autouse=True)
    def _cart_is_removed(self, broker):
        for letter in broker.dead_letters("cart"):
            about = {"message_id": uuid.uuid4(), "topic": letter.topic, "delivery_count": 1, "source": "", "fingerprint": ""}
            FailedDelivery.objects.create(consumer_group="cart", outcome="dead letter", **about)
        del register.registered["cart"]

    def test_has_its_letters_listed(self, broker, capsys):
        assert replay() == 0
        everything = capsys.readouterr().out
        assert replay("--group", "cart") == 0
        own = capsys.readouterr().out

        assert all(name in everything for name in ("b-cart", "b-points", "o-cart", "o-points"))
        assert "o-cart" in own
        assert "o-points" not in own

    def test_has_its_letters_replayed_and_discarded(self, broker):
        assert replay("o-cart") == 0
        assert replay("--group", "cart", "--all", "--discard", "--no-input") == 0

        assert dead(broker) == ["b-points", "o-points"]


class TestOutboxReplay:
    def test_refuses_a_topic_that_is_not_there(self, broker):
        with pytest.raises(CommandError, match=r"There is no topic 'ordres'\. Choices are: .*orders"):
            replay("--topic", "ordres")

    def test_lists_what_the_groups_gave_up(self, broker, capsys):
        assert replay() == 0

        kinds, letters = capsys.readouterr().out.split("\n\n")
        heads, *rows = letters.splitlines()
        assert heads.split() == ["message", "group", "topic", "deliveries", "given", "up", "at", "reason"]
        assert sorted(row.split()[0] for row in rows) == dead(broker) == ["b-cart", "b-points", "o-cart", "o-points"]
        assert all(row.endswith("cannot" + 20 * " handle it") for row in rows)
        assert [row.split()[:3] for row in kinds.splitlines()[1:]] == [
            ["1", group, topic] for group in ("cart", "points") for topic in ("bills", "orders")
        ]

    @pytest.mark.parametrize(
        ("chosen", "found"),
        [
            (["--group", "cart"], ["b-cart", "o-cart"]),
            (["--topic", "orders"], ["o-cart", "o-points"]),
            (["--group", "points", "--topic", "bills"], ["b-points"]),
            (["--group", "points", "--group", "cart", "--topic", "bills"], ["b-cart", "b-points"]),
            (["--error", "CART cannot"], ["b-cart", "o-cart"]),
            (["--error", "cart cannot", "--topic", "bills"], ["b-cart"]),
            (["--since", "1h", "--topic", "bills"], ["b-cart", "b-points"]),
        ],
    )
    def test_lists_those_of_a_group_or_topic(self, broker, capsys, chosen, found):
        assert replay(*chosen, "--json") == 0

        listed = json.loads(capsys.readouterr().out)["dead_letters"]
        assert sorted(letter["message_id"] for letter in listed) == found
        assert {letter["broker"] for letter in listed} == {"default"}

    @pytest.mark.parametrize("time", ["2920-01-01", "2920-01-01T12:00:00+02:00", "0m"])
    def test_lists_none_of_before_a_time(self, broker, capsys, time):
        assert replay("--since", time) == 0
        assert capsys.readouterr().out == "No dead letters.\n"

    def test_says_that_there_are_none(self, broker, capsys):
        assert replay("--all") == 0
        capsys.readouterr()

        assert replay() == 0
        assert capsys.readouterr().out == "No dead letters.\n"

    def test_replays_all_that_there_are(self, broker, capsys):
        for start in range(0, 3000, 500):
            broker.send([Outgoing(str(number), "orders", b"1") for number in range(start, start + 500)])
        for delivery in broker.receive("cart", ["orders"], limit=3000, invisible_for=MINUTE, wait=timedelta(0)):
            broker.dead_letter(delivery, "out of stock")

        code = replay("--all", "--error", "out of stock")

        assert (code, capsys.readouterr().out) == (0, "3000 dead letters replayed.\n")
        assert not [letter for letter in broker.dead_letters("cart", limit=10) if letter.reason == "out of stock"]

    def test_has_messages_delivered_to_their_group_again(self, broker, capsys):
        assert replay("o-cart") == 0

        assert capsys.readouterr().out == "1 dead letter replayed.\n"
        (again,) = broker.receive("cart", dict.fromkeys(TOPICS), limit=10, invisible_for=MINUTE, wait=timedelta(0))
        assert (again.message_id, again.delivery_count) == ("o-cart", 1)
        assert broker.backlog("points") == {"orders": 0, "bills": 0}

    def test_replays_all_of_a_group(self, broker):
        assert replay("--all", "--group", "cart") == 0

        assert dead(broker) == ["b-points", "o-points"]

    def test_writes_down_who_did_it(self, broker):
        replay("o-cart")

        row = OperatorAct.objects.get()
        assert (row.act, row.consumer_group, row.topic) == ("replayed", "cart", "orders")
        assert row.acted_by == actor("outbox_replay_unhandled")

    def test_lets_them_go(self, broker, capsys):
        assert replay("--all", "--discard", "--no-input") == 0

        assert dead(broker) == []
        assert broker.backlog("cart") == {"orders": 0, "bills": 0}
        assert capsys.readouterr().out == "4 dead letters discarded.\n"

    def test_discards_nothing_unasked_where_there_is_no_terminal(self, broker, capsys):
        with pytest.raises(CommandError, match="--no-input") as refused:
            replay("--all", "--discard")

        assert refused.value.returncode == 2
        assert len(dead(broker)) == 4
        assert "4 dead letters will be discarded. This cannot be undone" in capsys.readouterr().err

    @pytest.mark.parametrize(("answer", "left"), [("yes", 2), ("no", 4), ("", 4)])
    def test_says_what_it_will_discard_and_asks(self, broker, answer, left):
        primary, secondary = os.openpty()
        os.write(primary, f"{answer}\n".encode())
        with os.fdopen(secondary) as terminal, pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stdin", terminal)
            with suppress(CommandError):
                replay("--group", "cart", "--all", "--discard")
        os.close(primary)

        assert len(dead(broker)) == left

    def test_ends_with_1_when_one_was_not_found(self, broker, capsys):
        assert replay("o-cart", "nothing", "--json") == 1

        assert json.loads(capsys.readouterr().out) == {"replayed": 1, "not_found": ["nothing"], "cut": [], "troubles": []}

    def test_ends_with_1_when_there_are_more_than_it_reads(self, broker, capsys, monkeypatch):
        monkeypatch.setattr(letters, "READ_TO_SETTLE", 1)

        assert replay("--all", "--group", "cart") == 1
        assert "Group 'cart' has more dead letters: run the command again." in capsys.readouterr().out

    def test_ends_with_1_when_a_broker_does_not_say(self, broker, capsys, monkeypatch):
        def away(self, group, *, limit):
            raise BrokerUnavailable("It is away.")

        monkeypatch.setattr(MemoryBroker, "dead_letters", away)

        assert replay() == 1
        assert capsys.readouterr().out == "No dead letters.\n\nGroup 'cart': It is away.\n\nGroup 'points': It is away.\n"

    def test_ends_with_2_when_a_broker_goes_away_in_the_middle(self, broker, monkeypatch):
        def away(self, group, letters):
            raise BrokerUnavailable("It is away.")

        monkeypatch.setattr(MemoryBroker, "replay", away)

        with pytest.raises(CommandError, match="It is away") as refused:
            replay("--all")

        assert refused.value.returncode == 2

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (["o-cart", "--all"], "Choose either"),
            (["--discard"], "Choose the dead letters to discard"),
            (["--group", "card"], "Choices are: cart, points"),
        ],
    )
    def test_ends_with_2_when_it_is_asked_wrongly(self, broker, arguments, text):
        with pytest.raises(CommandError, match=text) as refused:
            replay(*arguments)

        assert refused.value.returncode == 2
        assert len(dead(broker)) == 4
