"""Features of brokers are checked by flags; without a feature, the error names the flag."""

import inspect

import pytest

from outbox.brokers import capabilities
from outbox.brokers.base import Broker
from outbox.brokers.capabilities import Capability, HalfMessages, Lookups
from outbox.brokers.memory import MemoryBroker
from outbox.errors import UnsupportedByBroker

KINDS = [
    kind
    for _, kind in inspect.getmembers(capabilities, inspect.isclass)
    if issubclass(kind, Capability) and kind is not Capability
]

Least = type("Least", (Broker,), dict.fromkeys(Broker.__abstractmethods__, lambda *args, **kwargs: []))


class TestFlags:
    @pytest.mark.parametrize("kind", KINDS)
    def test_are_all_false_on_a_broker_that_offers_the_least(self, kind: type[Capability]):
        assert getattr(Least, kind.flag) is False

    @pytest.mark.parametrize("kind", KINDS)
    def test_are_true_on_a_broker_that_adds_the_class(self, kind: type[Capability]):
        offering = type("Offering", (kind,), {})

        assert getattr(offering, kind.flag) is True


class TestOf:
    @pytest.mark.parametrize("kind", KINDS)
    def test_refuses_a_broker_that_does_not_offer_it(self, kind: type[Capability]):
        with pytest.raises(UnsupportedByBroker, match=f"Least has no {kind.__name__}. Check {kind.flag} first."):
            kind.of(Least("default", {}, []))

    def test_refuses_a_class_that_does_not_offer_it(self):
        with pytest.raises(UnsupportedByBroker, match="supports_half_messages"):
            HalfMessages.of(Least)

    def test_refuses_a_broker_that_has_turned_it_off(self):
        one_phase = type("OnePhase", (MemoryBroker,), {"supports_half_messages": False})

        with pytest.raises(UnsupportedByBroker, match="supports_half_messages"):
            HalfMessages.of(one_phase("default", {}, []))

    def test_refuses_a_broker_that_only_says_so(self):
        boasting = type("Boasting", (Least,), {"supports_lookups": True})

        with pytest.raises(UnsupportedByBroker, match="Lookups"):
            Lookups.of(boasting("default", {}, []))

    def test_returns_the_broker_itself_where_it_offers_it(self):
        broker = MemoryBroker("default", {}, [])

        assert HalfMessages.of(broker) is broker
        assert HalfMessages.of(MemoryBroker) is MemoryBroker
