import json
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from django.core.management import CommandError
from django.db import connection

from outbox import consumer
from outbox.consuming import register
from outbox.consuming.deferred import HELD
from outbox.management.acts import actor
from outbox.models import Deferred, Gap, Inbox, MessageState, OperatorAct, State
from outbox.testing.factories import DeferredFactory
from tests.commands import exit_code, refused
from tests.factories import BatchFactory, TopicFactory, stored

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def batch():
    """Two messages that the broker rejected."""
    return BatchFactory(topic=TopicFactory(name="broken"), size=2, state=State.DEAD, failures=1)


@pytest.fixture
def deferred():
    """A dead letter of each of two groups and topics, and a message that waits, by their own ids."""
    for group in ("cart", "points"):
        for topic in ("orders", "bills"):
            error = f"{group} cannot\n" + "handle it " * 20
            about = {
                "consumer_group": group,
                "topic": topic,
                "own_id": f"{topic[0]}-{group}",
                "key": group,
                "type": f"shop.{topic}",
            }
            DeferredFactory(dead=True, error=error, fingerprint=f"KeyError in {group}", **about)
    DeferredFactory(consumer_group="cart", own_id="later", waiting=True, reason="stop")


replay = partial(exit_code, "outbox_replay")


def states(batch):
    return [MessageState.objects.get(id=message_id).state for message_id in batch.message_ids]


def dead():
    return sorted(Deferred.objects.filter(dead_at__isnull=False).values_list("own_id", flat=True))


def answering(monkeypatch, answer, meanwhile=lambda: None):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: meanwhile() or answer)


class TestUnsent:
    def test_are_listed(self, batch, capsys):
        assert replay("--unsent") == 0
        assert "            2  broken" in capsys.readouterr().out
        assert states(batch) == ["dead"] * 2

    def test_are_sent_again(self, batch, capsys):
        assert replay("--unsent", batch.message_ids[0]) == 0

        assert states(batch) == ["released", "dead"]
        assert capsys.readouterr().out == "1 message will be sent again.\n"

    def test_are_sent_again_by_whoever_did_it(self, batch):
        replay("--unsent", batch.message_ids[0])
        replay("--unsent", "--all", "--discard", "--no-input")

        rows = OperatorAct.objects.order_by("id").values_list("act", "message_id", "topic", "acted_by")
        by = actor("outbox_replay")
        assert list(rows) == [("replayed", batch.message_ids[0], "broken", by), ("discarded", batch.message_ids[1], "broken", by)]

    @pytest.mark.parametrize("which", [["--topic", "broken", "--all"], ["--all"]])
    def test_are_all_sent_again(self, which, batch):
        assert replay("--unsent", *which) == 0
        assert states(batch) == ["released"] * 2

    def test_are_discarded(self, batch, capsys):
        assert replay("--unsent", "--all", "--discard", "--no-input") == 0

        assert states(batch) == ["discarded"] * 2
        assert capsys.readouterr().out == "2 messages discarded.\n"

    def test_are_discarded_as_asked_about_and_not_those_that_died_since(self, batch, monkeypatch):
        since = []
        answering(monkeypatch, "yes", lambda: since.append(BatchFactory(state=State.DEAD)))

        assert replay("--unsent", "--all", "--discard") == 0

        assert states(batch) == ["discarded"] * 2
        assert states(since[0]) == ["dead"]

    def test_are_not_discarded_unasked_where_there_is_no_terminal(self, batch, capsys):
        with refused("--no-input"):
            replay("--unsent", "--topic", "broken", "--all", "--discard")

        assert states(batch) == ["dead"] * 2
        assert "This cannot be undone" in capsys.readouterr().err

    def test_are_named_that_were_not_dead(self, batch, capsys):
        replay("--unsent", batch.message_ids[0])
        capsys.readouterr()

        assert replay("--unsent", *batch.message_ids, "--json") == 1

        said = json.loads(capsys.readouterr().out)
        assert said == {"messages": 1, "refused": {str(batch.message_ids[0]): "It is not dead."}}

    def test_end_with_1_when_nothing_is_dead(self, capsys):
        assert replay("--unsent", "--all") == 1
        assert capsys.readouterr().out == "No message is dead.\n"

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (["--topic", "brokn"], r"There is no topic 'brokn'\. Choices are: .*broken"),
            (["x"], "'x' is not a message id"),
            (["--group", "cart"], "--group cannot be used with --unsent"),
        ],
    )
    def test_end_with_2_when_asked_wrongly(self, arguments, text, batch):
        with refused(text):
            replay("--unsent", *arguments)


@pytest.mark.usefixtures("deferred")
class TestDeferred:
    def test_are_listed_by_kind_and_one_by_one(self, capsys):
        assert replay() == 0

        kinds, rows = capsys.readouterr().out.split("\n\n")
        assert [line.split()[:5] for line in kinds.splitlines()[1:]] == [
            ["1", "cart", "bills", "failed", "KeyError"],
            ["1", "cart", "orders", "failed", "KeyError"],
            ["1", "cart", "orders", "stop", kinds.splitlines()[3].split()[4]],
            ["1", "points", "bills", "failed", "KeyError"],
            ["1", "points", "orders", "failed", "KeyError"],
        ]
        assert len(rows.splitlines()) == 6
        assert "later" in rows.splitlines()[-1]

    @pytest.mark.parametrize(
        ("chosen", "found"),
        [
            (["--group", "cart", "--state", "dead"], ["b-cart", "o-cart"]),
            (["--topic", "bills", "--group", "points"], ["b-points"]),
            (["--error", "POINTS cannot"], ["b-points", "o-points"]),
            (["--type", "shop.bills", "--key", "cart"], ["b-cart"]),
            (["--state", "waiting"], ["later"]),
            (["--since", "1h", "o-cart", "--list"], ["o-cart"]),
            (["--all", "--list", "--discard", "--topic", "bills"], ["b-cart", "b-points"]),
            (["--all", "--list", "--hold"], ["later"]),
        ],
    )
    def test_are_listed_that_were_chosen(self, chosen, found, capsys):
        assert replay(*chosen, "--json") == 0

        listed = json.loads(capsys.readouterr().out)["deferred"]
        assert sorted(row["message_id"] for row in listed) == found

    def test_are_none_of_before_a_time(self, capsys):
        Deferred.objects.update(deferred_at=datetime.now(UTC) - timedelta(hours=2))

        assert replay("--since", "1h") == 0
        assert capsys.readouterr().out == "No deferred messages.\n"

    def test_are_replayed_where_they_are_dead(self, capsys):
        assert replay("--all", "--group", "cart") == 0

        assert dead() == ["b-points", "o-points"]
        assert capsys.readouterr().out == "2 messages replayed.\n"
        assert {act.acted_by for act in OperatorAct.objects.all()} == {actor("outbox_replay")}

    def test_are_replayed_by_their_ids(self, capsys):
        assert replay("o-cart", "later", "--json") == 1

        assert dead() == ["b-cart", "b-points", "o-points"]
        assert json.loads(capsys.readouterr().out) == {"replayed": 1, "not_found": ["later"]}

    def test_are_retried_now_and_held(self, capsys):
        row = Deferred.objects.get(own_id="later")

        assert replay("--hold", "later") == 0
        assert stored(row).due_at == HELD

        capsys.readouterr()
        assert replay("later", "--list", "--hold", "--json") == replay("--state", "held", "--json") == 0
        assert '"state": "held"' in capsys.readouterr().out

        assert replay("--retry-now", "--all") == 0
        assert stored(row).due_at <= datetime.now(UTC)

    def test_are_discarded(self, capsys):
        assert replay("--discard", "--no-input", "--all", "--state", "dead") == 0

        assert list(Deferred.objects.values_list("own_id", flat=True)) == ["later"]
        assert Inbox.objects.filter(delivery_count=0).count() == 4
        assert capsys.readouterr().out == "4 messages discarded.\n"

    def test_are_not_discarded_unasked_where_there_is_no_terminal(self):
        with pytest.raises(CommandError, match="--no-input"):
            replay("--discard", "--all")

        assert Deferred.objects.count() == 5

    @pytest.mark.parametrize(
        ("answer", "left"), [("yes", ["new"]), ("no", ["b-cart", "b-points", "later", "new", "o-cart", "o-points"])]
    )
    def test_are_discarded_as_asked_about(self, answer, left, monkeypatch, capsys):
        answering(monkeypatch, answer, lambda: DeferredFactory(dead=True, own_id="new") and None)

        with suppress(CommandError):
            replay("--discard", "--all")

        assert sorted(Deferred.objects.values_list("own_id", flat=True)) == left
        assert "5 messages will be discarded. This cannot be undone" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (["--group", "crt"], "There is no group 'crt'. Choices are: .*cart"),
            (["--topic", "order"], "There is no topic 'order'. Choices are: .*orders"),
            (["--discard"], "Choose the messages"),
            (["x", "--all"], "Choose either"),
            (["--database", "nowhere"], "No group has its inbox in database 'nowhere'"),
        ],
    )
    def test_end_with_2_when_asked_wrongly(self, arguments, text):
        with refused(text):
            replay(*arguments)


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
class TestSeveralDatabases:
    def test_are_looked_at_one_after_the_other(self, no_consumers, capsys):
        consumer(topic="orders", group="points", using="other")(lambda message, context: None)
        DeferredFactory(consumer_group="cart", own_id="here", dead=True)
        there = DeferredFactory.build(consumer_group="mail", own_id="there", dead=True)
        there.save(using="other")

        assert replay("--all", "--group", "mail", "--group", "cart") == 0

        assert capsys.readouterr().out == "2 messages replayed.\n"
        assert not Deferred.objects.using("other").filter(dead_at__isnull=False).exists()


class TestLost:
    @pytest.fixture
    def lost(self, monkeypatch):
        """A sent message of which a group has an open gap, and a number whose message is unknown."""
        monkeypatch.setattr(register, "registered", {**register.registered})
        batch = BatchFactory(topic=TopicFactory(name="orders"), size=1, first_seq=7, lane=1, state=State.SENT)
        consumer(topic="orders", group="cart")(lambda message: None)
        with connection.cursor() as cursor:
            cursor.execute("SELECT id FROM outbox_source")
            [source] = cursor.fetchone()
        Gap.objects.create(consumer_group="cart", source=source, topic="orders", lane=1, first_number=7, last_number=8)
        return batch.message_ids[0]

    def test_is_listed_with_what_can_be_done(self, lost, capsys):
        assert replay("--lost") == 0

        first, second = capsys.readouterr().out.splitlines()[1:]
        assert first.split() == [str(lost), "cart", "orders", "1", "7", "1"]
        assert second.endswith("1       7         1  Its row is gone: it was pruned, or deleted by hand.")

    def test_is_delivered_to_the_group(self, lost, capsys):
        assert replay("--lost", "--all") == 1  # one of two

        assert capsys.readouterr().out.splitlines() == [
            "1 message is delivered again.",
            "1 not: Its row is gone: it was pruned, or deleted by hand.",
        ]
        assert Deferred.objects.get().message_id == lost
        assert replay("--lost", lost) == 1  # the group has it

    def test_is_named_as_json(self, lost, capsys):
        replay("--lost", "--group", "cart", "--topic", "orders", "--json")

        rows = json.loads(capsys.readouterr().out)["lost"]
        assert [row["message_id"] for row in rows] == [str(lost), None]

    @pytest.mark.parametrize("option", ["--hold", "--discard", "--retry-now"])
    def test_cannot_be_discarded_or_held(self, lost, option):
        with pytest.raises(CommandError, match=f"{option} cannot be used with --lost"):
            replay("--lost", "--all", option)

    def test_says_that_nothing_is_lost(self, capsys):
        replay("--lost")
        replay("--ignored")

        assert capsys.readouterr().out.splitlines() == ["No lost messages.", "No ignored messages."]
