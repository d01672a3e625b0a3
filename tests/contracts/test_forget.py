"""A group that is forgotten: what waits for it is dropped, and it begins as a new one if it receives again."""

from contextlib import suppress

import pytest

from outbox.brokers.base import Broker
from outbox.errors import BrokerUnavailable, UnsupportedByBroker
from tests.contracts.acts import Acts
from tests.waiting import wait_until


class TestForgetGroup:
    @pytest.mark.needs("forgets_groups")
    def test_drops_what_waits_for_it_and_its_dead_letters_and_nothing_of_others(self, acts: Acts, broker: Broker):
        for group in ("gone", "other"):
            acts.receive(group=group)
        acts.send_bodies(b"poison")
        [poison] = acts.receive(group="gone", count=1)
        broker.dead_letter(poison, "cannot be read")
        acts.send_bodies(b"a", b"b")
        acts.waiting(group="gone", count=2)
        acts.dead_letters("gone", count=1)

        def forget() -> bool:
            with suppress(BrokerUnavailable):  # a server may still count the connection that has just read dead letters
                broker.forget_group("gone", broker.topics)
                return True
            return False

        wait_until(forget)

        assert acts.waiting(group="gone", count=0) == 0
        assert acts.dead_letters("gone") == []
        assert acts.waiting(group="other", count=3) == 3

    @pytest.mark.needs("forgets_groups")
    def test_keeps_what_waits_in_other_topics(self, acts: Acts, broker: Broker):
        acts.receive(group="gone")
        acts.send_bodies(b"a")
        acts.waiting(group="gone", count=1)

        broker.forget_group("gone", ["elsewhere"])

        assert acts.waiting(group="gone", count=1) == 1

    @pytest.mark.needs("not forgets_groups")
    def test_is_refused_with_a_reason_where_only_the_server_can(self, broker: Broker):
        with pytest.raises(UnsupportedByBroker, match="own tool"):
            broker.forget_group("group", broker.topics)
