"""A group that is forgotten: what waits for it is dropped, and it begins as a new one if it receives again."""

import pytest

from outbox.brokers.base import Broker
from outbox.errors import UnsupportedByBroker
from tests.contracts.acts import Acts
from tests.contracts.harness import Harness


class TestForgetGroup:
    @pytest.mark.needs("forgets_groups")
    def test_drops_what_waits_for_it_and_nothing_of_others(self, acts: Acts, broker: Broker, harness: Harness):
        for group in ("gone", "other"):
            acts.receive(group=group)
        acts.send_bodies(b"a", b"b")
        acts.waiting(group="gone", count=2)

        harness.open().forget_group("gone", broker.topics)

        assert acts.waiting(group="gone", count=0) == 0
        assert acts.waiting(group="other", count=2) == 2

    @pytest.mark.needs("forgets_groups")
    def test_keeps_what_waits_in_other_topics(self, acts: Acts, broker: Broker):
        acts.receive(group="gone")
        acts.send_bodies(b"a")
        acts.waiting(group="gone", count=1)

        broker.forget_group("gone", ["elsewhere"])

        assert acts.waiting(group="gone", count=1) == 1

    @pytest.mark.needs("not forgets_groups")
    def test_is_refused_with_a_reason_where_only_the_server_can(self, broker: Broker):
        with pytest.raises(UnsupportedByBroker, match="cannot drop the messages"):
            broker.forget_group("group", broker.topics)
