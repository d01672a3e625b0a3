"""`outbox_topics` on the embedded broker. What servers answer is tested with each of them, in tests/outbox/brokers."""

import json
from functools import partial

import pytest
from django.db import connections

from outbox.embedded.models import EmbeddedTopic
from outbox.ids import topic_number
from tests.commands import refused, run

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

topics = partial(run, "outbox_topics")

EMBEDDED = "outbox.embedded.EmbeddedBroker"


@pytest.fixture(autouse=True)
def _brokers(settings, no_consumers):
    settings.OUTBOX = {
        "BROKERS": {
            "default": {"BACKEND": EMBEDDED},
            "memory": {"BACKEND": "outbox.brokers.memory.MemoryBroker"},
            "away": {"BACKEND": EMBEDDED, "OPTIONS": {"DATABASE": "away"}},
            "idle": {"BACKEND": EMBEDDED},
        },
        "TOPICS": {
            "orders": {"TYPE": "fifo"},
            "parcels": {"QUEUES": 2},
            "notes": {"BROKER": "memory"},
            "far": {"BROKER": "away"},
        },
        "CELERY_WAKEUP": False,
    }


@pytest.fixture
def away():
    connections.settings["away"] = {**connections.settings["default"], "HOST": "127.0.0.1", "PORT": "1"}
    yield
    del connections.settings["away"], connections["away"]


def states(said):
    [broker] = json.loads(said)["brokers"]
    return {one["name"]: one["state"] for one in broker["resources"]}


class TestTopics:
    def test_lists_what_is_missing_and_creates_nothing(self):
        said, code = topics("--broker", "default")

        assert code == 1
        assert said.splitlines() == [
            "broker   what   name     state    settings",
            "default  topic  orders   missing  type=fifo, queues=4",
            "default  topic  parcels  missing  type=transaction, queues=2",
            "",
            "Run manage.py outbox_topics --create to create what is missing.",
        ]
        assert not EmbeddedTopic.objects.exists()

    def test_creates_what_is_missing_and_once(self):
        first, code = topics("--broker", "default", "--create", "--json")
        again, code_again = topics("--broker", "default", "--create", "--json")

        assert (states(first), code) == ({"orders": "created", "parcels": "created"}, 0)
        assert (states(again), code_again) == ({"orders": "there", "parcels": "there"}, 0)
        assert set(EmbeddedTopic.objects.values_list("name", "type", "queues")) == {
            ("orders", "fifo", 4),
            ("parcels", "transaction", 2),
        }

    def test_shows_what_is_different_and_never_changes_it(self):
        EmbeddedTopic.objects.create(id=topic_number("orders"), name="orders", type="normal", queues=8)

        said, code = topics("--broker", "default", "--create")

        assert code == 1
        assert "default  topic  orders   different  type normal, not fifo; 8 queues, not 4" in said
        assert "default  topic  parcels  created    type=transaction, queues=2" in said
        assert "What differs was left as it is" in said
        assert EmbeddedTopic.objects.values_list("type", "queues").get(name="orders") == ("normal", 8)

    def test_says_which_broker_does_not_tell_what_it_needs(self):
        assert topics("--broker", "memory") == (
            "Broker 'memory': MemoryBroker does not list the resources that it needs.\n",
            0,
        )

    def test_says_which_broker_is_away_and_goes_on_with_others(self, away):
        said, code = topics("--broker", "away", "--broker", "default", "--create")

        assert code == 1
        assert "Broker 'away': Database 'away' cannot be reached" in said
        assert EmbeddedTopic.objects.count() == 2

    def test_says_that_a_broker_has_no_topics(self):
        assert topics("--broker", "idle") == ("There are no topics in settings.\n", 0)

    def test_refuses_a_broker_that_is_not_in_settings(self):
        with refused("There is no broker 'nobody' in settings"):
            topics("--broker", "nobody")
