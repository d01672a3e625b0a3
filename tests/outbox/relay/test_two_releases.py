"""Topics that a new release moves, renames, removes or retypes while messages wait, and relays of both releases run."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from outbox import atomic, database, publish_raw
from outbox.batches.claim import Scope, claim
from outbox.models import Batch, MessageState, State, Topic
from outbox.monitoring.attention import read_attention
from outbox.relay import hosts
from outbox.relay.hosts import NO_IDLE_TIMEOUT, RelayTarget
from outbox.relay.lane import take_lane
from outbox.topics import forget, match_topics, write_topics

pytestmark = pytest.mark.django_db(transaction=True)

EMBEDDED = {"BACKEND": "outbox.embedded.EmbeddedBroker"}


def release(**topics: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a release with two brokers."""
    return {"BROKERS": {"old": EMBEDDED, "new": EMBEDDED}, "TOPICS": topics, "CELERY_WAKEUP": False}


class Releases:
    """Processes of one release or another, one after the other."""

    def __init__(self, settings: Any) -> None:
        self._settings = settings

    def use(self, outbox: dict[str, Any]) -> None:
        """Act as a process of a release from now on."""
        self._settings.OUTBOX = outbox
        forget("default")

    def run(self, outbox: dict[str, Any], broker: str, seconds: float = 10) -> None:
        """Run a relay of a release for a broker until nothing waits for it."""
        self.use(outbox)
        target = RelayTarget("default", broker)
        hosts.run_once(target, note="test", at_most=timedelta(seconds=seconds), idle_timeout=NO_IDLE_TIMEOUT)

    def publish(self, outbox: dict[str, Any], topic: str, **options: Any) -> None:
        """Publish three messages as a process of a release does."""
        self.use(outbox)
        with atomic():
            for number in range(3):
                publish_raw(topic, {"number": number}, **options)


@pytest.fixture
def releases(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Releases]:
    monkeypatch.setattr(hosts, "MATCH_TOPICS_SECONDS", 0.0)
    monkeypatch.setattr(hosts, "_compared_topics", {})
    yield Releases(settings)
    forget("default")


def unsent() -> list[str]:
    return [one.state for one in MessageState.objects.exclude(state="sent")]


class TestATopicThatIsMovedToAnotherBroker:
    OLD = release(orders={"BROKER": "old", "TYPE": "normal"})
    NEW = release(orders={"BROKER": "new", "TYPE": "normal"})

    def test_is_sent_by_the_relays_of_both_releases(self, releases):
        releases.publish(self.OLD, "orders")
        releases.run(self.NEW, "new")
        assert unsent() == []

        releases.publish(self.NEW, "orders")
        releases.run(self.OLD, "old")
        assert unsent() == []

    def test_is_sent_though_a_process_of_the_old_release_started_last(self, releases):
        releases.run(self.NEW, "new")
        releases.use(self.OLD)
        write_topics("default")
        releases.publish(self.NEW, "orders")

        releases.run(self.NEW, "old")  # the new release has nothing there
        releases.run(self.NEW, "new")

        assert unsent() == []
        assert Topic.objects.get(name="orders").broker == "new"

    def test_is_given_back_by_a_relay_whose_settings_have_it_elsewhere(self, releases, monkeypatch):
        releases.publish(self.OLD, "orders")
        releases.use(self.OLD)
        write_topics("default")
        monkeypatch.setattr(hosts, "match_topics", lambda connection: set())  # the rows are not corrected yet

        releases.run(self.NEW, "old")

        batch = Batch.objects.get()
        assert (batch.state, batch.failures) == (State.RELEASED, 0)
        assert "do not assign topic 'orders' to broker 'old'" in batch.last_error
        assert batch.attempt == 1  # and is claimed no more

        monkeypatch.setattr(hosts, "match_topics", match_topics)
        releases.run(self.NEW, "new")
        assert unsent() == []


class TestATopicThatIsRemovedOrRenamed:
    OLD = release(orders={"BROKER": "old", "TYPE": "normal"})
    NEW = release(bills={"BROKER": "old", "TYPE": "normal"})

    def test_waits_and_is_named_until_it_is_put_back(self, releases):
        releases.publish(self.OLD, "orders")

        releases.run(self.NEW, "old")

        assert len(unsent()) == 3
        found = [one for one in read_attention(database.raw("default"), "default") if one.id == "outbox.unknown_topic"]
        assert [one.msg for one in found] == ['3 messages wait, but OUTBOX["TOPICS"] has no such topic, so no relay sends them.']
        assert not Batch.objects.exists()

        releases.run(release(**self.OLD["TOPICS"], **self.NEW["TOPICS"]), "old")
        assert unsent() == []

    def test_is_sent_by_the_relays_of_the_old_release_while_they_live(self, releases):
        releases.publish(self.OLD, "orders")
        releases.publish(self.NEW, "bills")

        releases.run(self.OLD, "old")
        assert unsent() == ["waiting"] * 3
        releases.run(self.NEW, "old")

        assert unsent() == []


class TestATopicOfAnotherType:
    def test_waits_where_its_broker_has_it_as_it_was_and_says_so(self, releases, monkeypatch):
        one, two = (release(orders={"BROKER": "old", "TYPE": kind}) for kind in ("normal", "transaction"))
        monkeypatch.setattr("outbox.relay.rounds.MISCONFIGURED_RETRY", timedelta(microseconds=1))
        releases.publish(one, "orders")
        releases.run(one, "old")

        releases.publish(two, "orders")
        releases.run(two, "old", seconds=0.2)

        batch = Batch.objects.get(state=State.RELEASED)
        assert "is of type transaction in settings and of type normal in the broker" in batch.last_error
        releases.run(one, "old")
        assert unsent() == []

    @pytest.mark.parametrize("kinds", [("normal", "fifo"), ("fifo", "normal")])
    def test_is_sent_when_it_begins_or_ends_to_keep_order(self, releases, kinds):
        before, after = (release(orders={"BROKER": "old", "TYPE": kind}) for kind in kinds)
        releases.publish(before, "orders", key="a" if kinds[0] == "fifo" else "")

        releases.run(after, "old")
        releases.publish(after, "orders", key="a")
        releases.run(after, "old")

        assert unsent() == []


class TestFewerLanes:
    def test_leave_nothing_behind_in_those_that_are_no_more(self, releases):
        many = release(orders={"BROKER": "old", "TYPE": "normal"}) | {"RELAY": {"LANES": 16}}
        few = {**many, "RELAY": {"LANES": 1}}
        releases.publish(many, "orders")
        write_topics("default")
        with database.connect("default") as holder, database.connect("default") as dying:
            take_lane(holder, lanes=16)
            lane = take_lane(dying, lanes=16)
            (claimed,) = claim(dying, Scope("old"), lane=lane, lease=timedelta(hours=1), limit=10)
        assert claimed[2]
        assert lane == 2

        releases.run(few, "old")

        assert unsent() == []
