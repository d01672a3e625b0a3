import json
from datetime import timedelta

import pytest
from django.core.management import call_command

from outbox import consumer
from outbox.brokers.base import Outgoing
from outbox.brokers.memory import MemoryBroker
from outbox.consuming.backlog import Backlog, read_backlogs
from outbox.errors import BrokerUnavailable
from tests.outbox.consuming.messages import Placed


@pytest.fixture
def cart(broker):
    """A group that has received nothing of two messages yet."""
    consumer(Placed, group="cart")(lambda message, context: None)
    broker.receive("cart", {"orders": None}, limit=1, invisible_for=timedelta(seconds=1), wait=timedelta(0))
    broker.send([Outgoing(name, "orders", b"{}") for name in "ab"])


class TestReadBacklogs:
    def test_counts_what_waits_for_each_group(self, cart):
        consumer(Placed, group="never-received")(lambda message, context: None)

        assert read_backlogs() == [Backlog("cart", "default", "orders", 2)]

    def test_says_which_broker_cannot_be_asked(self, cart, monkeypatch):
        def refuse(broker, group):
            raise BrokerUnavailable("nobody answers")

        monkeypatch.setattr(MemoryBroker, "backlog", refuse)

        assert read_backlogs() == [Backlog("cart", "default", "", None, "nobody answers")]


@pytest.mark.django_db(transaction=True)
class TestOutboxStatus:
    def test_shows_what_waits_for_the_groups(self, cart, capsys):
        call_command("outbox_status", "--database", "default")

        assert capsys.readouterr().out.splitlines()[-2:] == [
            "consumer group  topic   broker   waiting for it",
            "cart            orders  default               2",
        ]

    def test_needs_a_person_where_a_broker_cannot_be_asked(self, cart, monkeypatch, capsys):
        def refuse(broker, group):
            raise BrokerUnavailable("nobody answers")

        monkeypatch.setattr(MemoryBroker, "backlog", refuse)

        with pytest.raises(SystemExit) as end:
            call_command("outbox_status", "--database", "default", "--json")

        assert end.value.code == 1
        assert json.loads(capsys.readouterr().out)["consumers"][0]["trouble"] == "nobody answers"
