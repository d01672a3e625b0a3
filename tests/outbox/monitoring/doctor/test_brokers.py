import pytest

from outbox.brokers.base import Problem
from outbox.brokers.memory import MemoryBroker
from outbox.errors import BrokerUnavailable
from outbox.monitoring.doctor import Level, check_brokers

pytestmark = pytest.mark.django_db

BROKER = "broker 'default'"


class TestBrokers:
    def test_are_well_when_they_find_nothing(self, about):
        ((level, text),) = about(check_brokers, BROKER)

        assert level is Level.OK
        assert text.startswith("MemoryBroker, 3 topics as in settings")

    def test_say_what_they_find(self, about, monkeypatch):
        monkeypatch.setattr(MemoryBroker, "check", lambda self: [Problem("Topic 'orders' is missing.", "Create it.")])

        assert about(check_brokers, BROKER) == [(Level.WARNING, "Topic 'orders' is missing.")]

    def test_are_named_when_they_are_away(self, about, monkeypatch):
        def away(self):
            raise BrokerUnavailable("It is away.\nIs it?")

        monkeypatch.setattr(MemoryBroker, "check", away)

        assert about(check_brokers, BROKER) == [(Level.ERROR, "cannot be reached: It is away. Is it?")]

    def test_are_left_alone_when_nothing_goes_to_them(self, about, settings):
        settings.OUTBOX = {**settings.OUTBOX, "TOPICS": {}}

        assert about(check_brokers, BROKER) == []
