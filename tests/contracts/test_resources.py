"""What topics need at a server: listed, created where it is missing, and never changed."""

import uuid
from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from outbox.brokers.base import Broker, ServerResource
from outbox.brokers.capabilities import ListsResources
from outbox.errors import BrokerUnavailable
from outbox.message import TopicSpec
from tests.contracts.acts import Acts
from tests.contracts.harness import Harness
from tests.waiting import wait_until

LANES = 16


@pytest.fixture(autouse=True)
def _new_topics(harness: Harness) -> None:
    """Give the harness topics that its server does not have."""
    unique = uuid.uuid4().hex[:8]
    harness.topics = {
        kind: replace(topic, name=f"new-{kind}-{unique}", groups=frozenset({"group"})) for kind, topic in harness.topics.items()
    }


def resources(broker: Broker, source: str, *, readers: Iterable[str] = ()) -> list[ServerResource]:
    return ListsResources.of(broker).list_resources(sources=[source], lanes=LANES, readers=list(readers))


def names(found: Iterable[ServerResource]) -> set[tuple[str, str]]:
    return {(one.kind, one.name) for one in found}


class TestListResources:
    @pytest.mark.needs("ListsResources")
    def test_names_each_topic_and_creates_none(self, broker: Broker, harness: Harness):
        first, again = resources(broker, harness.source), resources(broker, harness.source)

        missing = names(one for one in again if one.exists is False)
        assert names(first) == names(again)
        assert missing >= {("topic", topic.name) for topic in harness.topics.values()}
        assert all(one.wanted for one in again)

    @pytest.mark.needs("ListsResources")
    def test_finds_what_was_created_and_creates_nothing_twice(self, broker: Broker, harness: Harness):
        for one in resources(broker, harness.source, readers=["reader"]):
            one.create()
        for one in resources(broker, harness.source, readers=["reader"]):
            one.create()

        found = resources(broker, harness.source, readers=["reader"])
        assert [one for one in found if not one.exists or one.differences or one.trouble] == []

    @pytest.mark.needs("ListsResources")
    def test_creates_all_that_messages_need(self, acts: Acts, broker: Broker, harness: Harness):
        for one in resources(broker, harness.source):
            one.create()

        acts.receive()
        acts.send_bodies(b"a")

        assert wait_until(lambda: [one.body for one in acts.receive(count=1)]) == [b"a"]

    @pytest.mark.needs("ListsResources")
    def test_names_what_is_different_and_leaves_it(self, broker: Broker, harness: Harness):
        for one in resources(broker, harness.source):
            one.create()
        harness.topics = {kind: _changed(topic) for kind, topic in harness.topics.items()}
        other = harness.open()

        for one in resources(other, harness.source):
            one.create()

        different = names(one for one in resources(other, harness.source) if one.differences)
        assert {name.partition(":")[0] for _, name in different} >= {topic.name for topic in harness.topics.values()}
        assert not any(one.differences for one in resources(broker, harness.source))

    @pytest.mark.needs("ListsResources")
    def test_fails_where_the_server_is_away(self, harness: Harness):
        with pytest.raises(BrokerUnavailable):
            resources(harness.open_unreachable(), harness.source)


def _changed(topic: TopicSpec) -> TopicSpec:
    return replace(topic, queues=topic.queues + 1, retention=topic.retention / 2)
