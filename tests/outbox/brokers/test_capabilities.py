"""Which features a broker has; without one, the error names it."""

import inspect

import pytest

from outbox.brokers import capabilities
from outbox.brokers.base import Broker
from outbox.brokers.capabilities import Capability, HalfMessages, Lookups, NeedsCheckLoop, TransactionalSends
from outbox.brokers.memory import MemoryBroker
from outbox.errors import UnsupportedByBroker

KINDS = [
    kind
    for _, kind in inspect.getmembers(capabilities, inspect.isclass)
    if issubclass(kind, Capability) and kind is not Capability
]

Least = type("Least", (Broker,), dict.fromkeys(Broker.__abstractmethods__, lambda *args, **kwargs: []))


class TestHas:
    @pytest.mark.parametrize("kind", KINDS)
    def test_is_false_of_a_broker_that_offers_the_least(self, kind: type[Capability]):
        assert not kind.has(Least)
        assert not kind.has(Least("default", {}, []))

    @pytest.mark.parametrize("kind", KINDS)
    def test_is_true_of_a_broker_that_adds_the_class(self, kind: type[Capability]):
        assert kind.has(type("Offering", (kind,), {}))

    def test_is_false_of_a_feature_that_a_broker_lacks_and_all_that_build_on_it(self):
        one_phase = type("OnePhase", (MemoryBroker,), {"lacks": (HalfMessages,)})

        assert not HalfMessages.has(one_phase)
        assert not NeedsCheckLoop.has(one_phase)
        assert Lookups.has(one_phase)

    def test_may_depend_on_the_options(self):
        assert TransactionalSends.has(MemoryBroker("default", {"TRANSACTIONS": True}, []))
        assert not TransactionalSends.has(MemoryBroker("default", {}, []))


class TestOf:
    @pytest.mark.parametrize("kind", KINDS)
    def test_refuses_a_broker_that_does_not_have_it(self, kind: type[Capability]):
        with pytest.raises(
            UnsupportedByBroker, match=rf"Least has no {kind.__name__}. Check {kind.__name__}.has\(broker\) first."
        ):
            kind.of(Least("default", {}, []))

    def test_returns_the_broker_itself_where_it_has_it(self):
        broker = MemoryBroker("default", {}, [])

        assert HalfMessages.of(broker) is broker
