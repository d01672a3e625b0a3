"""`outbox_forget`: drop what waits for a group whose code was removed."""

import json
import sys
from collections import Counter
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from io import StringIO

import pytest
from django.core.management import CommandError

from outbox import conf, consumer
from outbox.brokers.base import Outgoing
from outbox.consuming import register
from outbox.embedded.models import EmbeddedOffset
from outbox.management.commands import outbox_forget
from outbox.models import Deferred, Gap, Process
from outbox.testing.factories import DeferredFactory
from tests.commands import run
from tests.factories import message_id

forget = partial(run, "outbox_forget")

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

NO_TIME = timedelta()


@pytest.fixture(autouse=True)
def _embedded(settings, no_consumers):
    broker = {"BACKEND": "outbox.embedded.EmbeddedBroker"}
    settings.OUTBOX = {
        "BROKERS": {"default": broker},
        "TOPICS": {topic: {"TYPE": "normal"} for topic in ("orders", "parcels")},
        "CELERY_WAKEUP": False,
    }


@pytest.fixture
def mail():
    """A group that has received: two orders and a parcel wait, and an order is a dead letter. Its code is gone."""
    with closing(conf.make_broker("default")) as broker:
        broker.receive("mail", ["orders", "parcels"], limit=1, invisible_for=timedelta(seconds=1), wait=NO_TIME)
        topics = ["orders", "orders", "parcels"]
        broker.send([Outgoing(str(message_id()), topic, b"{}") for topic in topics])
    DeferredFactory(consumer_group="mail", topic="orders", dead=True)
    Gap.objects.create(consumer_group="mail", source="s", topic="orders", lane=1, first_number=1, last_number=2)


def waiting():
    with closing(conf.make_broker("default")) as broker:
        deferred = Counter(Deferred.objects.filter(consumer_group="mail").values_list("topic", flat=True))
        return broker.backlog("mail").waiting, deferred


class TestForget:
    def test_drops_all_that_is_stored_of_a_group_and_says_what(self, mail):
        said, code = forget("mail", "--no-input", "--json")

        assert code == 0
        assert json.loads(said)["dropped"] == [
            {"database": "default", "broker": "default", "topic": "orders", "waiting": 2, "deferred": 1},
            {"database": "default", "broker": "default", "topic": "parcels", "waiting": 1, "deferred": 0},
        ]
        assert waiting() == ({}, {})
        assert not EmbeddedOffset.objects.exists()
        assert not Gap.objects.exists()

    def test_drops_a_topic_alone(self, mail):
        said, code = forget("mail", "--topic", "orders", "--no-input")

        assert (code, said.splitlines()[-1]) == (0, "Dropped.")
        assert waiting() == ({"parcels": 1}, {})

    def test_keeps_topics_that_the_group_still_has_a_handler_for(self, mail):
        consumer(topic="parcels", group="mail")(lambda message, context: None)

        forget("mail", "--no-input")

        assert waiting() == ({"parcels": 1}, {})

    def test_drops_nothing_without_a_confirmation(self, mail, monkeypatch, capsys):
        monkeypatch.setattr(sys, "stdin", StringIO())

        with pytest.raises(CommandError, match="Nothing was done"):
            forget("mail")

        assert "orders" in capsys.readouterr().err
        assert waiting() == ({"orders": 2, "parcels": 1}, {"orders": 1})

    def test_refuses_where_a_consumer_has_started_during_the_confirmation(self, mail, monkeypatch):
        def answer(warning):
            subscriptions = ["orders\x1ftopic orders\x1f*"]
            Process.objects.create(
                kind="consumer", host="web", pid=7, broker="default", consumer_group="mail", subscriptions=subscriptions
            )

        monkeypatch.setattr(outbox_forget, "confirm", answer)

        with pytest.raises(CommandError, match="A consumer of group 'mail' takes topic 'orders'"):
            forget("mail")

        assert waiting() == ({"orders": 2, "parcels": 1}, {"orders": 1})

    def test_says_that_nothing_waits(self, db):
        assert forget("nobody", "--no-input") == ("Nothing waits for group 'nobody'.\n", 1)

    def test_refuses_a_topic_that_has_a_handler(self, mail):
        consumer(topic="orders", group="mail")(lambda message, context: None)

        with pytest.raises(CommandError, match="has a handler for topic 'orders'"):
            forget("mail", "--topic", "orders", "--no-input")

    @pytest.mark.parametrize("silent", [0, 50])
    def test_refuses_while_a_process_of_another_release_takes_the_messages(self, silent, mail):
        subscriptions = ["orders\x1ftopic orders\x1f*"]
        made = Process.objects.create(
            kind="consumer", host="web", pid=7, broker="other", consumer_group="mail", subscriptions=subscriptions
        )
        Process.objects.filter(id=made.id).update(beat_at=datetime.now(UTC) - timedelta(minutes=silent))

        with pytest.raises(CommandError, match="A consumer of group 'mail' takes topic 'orders': process web:7"):
            forget("mail", "--no-input")

        assert register.groups() == {}
        assert waiting() == ({"orders": 2, "parcels": 1}, {"orders": 1})
