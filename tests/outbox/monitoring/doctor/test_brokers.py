from uuid import uuid4

import pytest

from outbox import database
from outbox.brokers.memory import MemoryBroker
from outbox.brokers.memory.store import forget
from outbox.database.identity import read_identity
from outbox.errors import BrokerUnavailable
from outbox.findings import misconfigured
from outbox.monitoring.doctor import check_brokers
from tests.factories import TicketFactory, TopicFactory

pytestmark = pytest.mark.django_db

BROKER = "broker 'default'"


@pytest.fixture
def unnamed():
    """Return the name of a broker that no other test uses."""
    name = str(uuid4())
    yield name
    forget(name)


class TestBrokers:
    def test_are_well_when_they_find_nothing(self, about):
        ((level, text),) = about(check_brokers, BROKER)

        assert level == "ok"
        assert text.startswith("MemoryBroker, 3 topics as in settings")

    def test_say_what_they_find(self, about, monkeypatch):
        monkeypatch.setattr(MemoryBroker, "check", lambda self: [misconfigured("Topic 'orders' is missing.", "Create it.")])

        assert about(check_brokers, BROKER) == [("warning", "Topic 'orders' is missing.")]

    def test_are_named_when_they_are_away(self, about, monkeypatch):
        def away(self):
            raise BrokerUnavailable("It is away.\nIt is.")

        monkeypatch.setattr(MemoryBroker, "check", away)

        assert about(check_brokers, BROKER) == [("warning", "It cannot be reached. It is away. It is.")]

    @pytest.mark.django_db(transaction=True, databases=["default", "other"])
    def test_name_a_database_that_lacks_what_was_sent(self, about, settings, unnamed):
        options = {"NAME": unnamed, "TRANSACTIONS": True}
        default = {"BACKEND": "outbox.brokers.memory.MemoryBroker", "OPTIONS": options}
        settings.OUTBOX = {**settings.OUTBOX, "BROKERS": {**settings.OUTBOX["BROKERS"], "default": default}}
        TicketFactory.create_batch(2, topic=TopicFactory(name="orders"))
        source = read_identity(database.raw("default")).source
        relay = MemoryBroker("default", options, [])
        relay.open_lane(source, 3)
        assert [level for level, _ in about(check_brokers, BROKER)] == ["ok"]
        relay.send_transaction(3, [], '{"sent":[[1000000,1]]}')

        ((level, text), *_) = about(check_brokers, BROKER)

        assert level == "warning"
        assert text.startswith("has messages that database 'default' does not know as sent: the database was restored,")
        assert "Of its 2 unsent messages, relays will send again those" in text
        assert relay.is_lane_open(3)

    def test_are_left_alone_when_nothing_goes_to_them(self, about, settings):
        settings.OUTBOX = {**settings.OUTBOX, "TOPICS": {}}

        assert about(check_brokers, BROKER) == []
