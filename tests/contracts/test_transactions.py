"""Transactional sends: messages and their marker together, from one holder of a lane at a time."""

import pytest

from outbox.brokers.base import SendStatus
from outbox.brokers.capabilities import TransactionalSends
from outbox.message import TopicType
from tests.contracts.acts import Acts
from tests.contracts.harness import Harness

ACCEPTED, REFUSED, UNAVAILABLE = SendStatus.ACCEPTED, SendStatus.REFUSED, SendStatus.UNAVAILABLE
LANE, OTHER = 3, 4

pytestmark = pytest.mark.needs("TransactionalSends")


@pytest.fixture
def sender(harness: Harness) -> TransactionalSends:
    sender = TransactionalSends.of(harness.open())
    sender.open_lane(harness.source, LANE)
    return sender


def statuses(sender: TransactionalSends, messages: list, marker: str, lane: int = LANE) -> list[SendStatus]:
    return [result.status for result in sender.send_transaction(lane, messages, marker)]


class TestTransaction:
    def test_shows_its_messages_and_its_marker(self, acts: Acts, harness: Harness, sender: TransactionalSends):
        messages = [acts.message(body=b"a"), acts.message(TopicType.FIFO, key="k", body=b"b")]

        assert statuses(sender, messages, "batch 1") == [ACCEPTED] * 2

        assert acts.bodies(count=1) == [b"a"]
        assert acts.bodies(TopicType.FIFO, count=1) == [b"b"]
        assert TransactionalSends.of(harness.open()).open_lane(harness.source, LANE) == "batch 1"

    def test_overwrites_the_marker_of_the_one_before(self, acts: Acts, harness: Harness, sender: TransactionalSends):
        statuses(sender, [acts.message()], "batch 1")
        statuses(sender, [acts.message()], "batch 2")

        assert TransactionalSends.of(harness.open()).open_lane(harness.source, LANE) == "batch 2"

    def test_may_hold_a_marker_alone(self, harness: Harness, sender: TransactionalSends):
        assert statuses(sender, [], "nothing yet") == []

        assert TransactionalSends.of(harness.open()).open_lane(harness.source, LANE) == "nothing yet"

    def test_stores_nothing_when_one_message_cannot_go(self, acts: Acts, harness: Harness, sender: TransactionalSends):
        statuses(sender, [acts.message(body=b"before")], "batch 1")

        found = statuses(sender, [acts.message(body=b"a"), acts.message(body=b""), acts.message(body=b"c")], "batch 2")

        assert found == [UNAVAILABLE, REFUSED, UNAVAILABLE]
        assert acts.bodies(count=1) == [b"before"]
        assert TransactionalSends.of(harness.open()).open_lane(harness.source, LANE) == "batch 1"

    def test_takes_the_others_when_they_are_sent_without_it(self, acts: Acts, sender: TransactionalSends, harness: Harness):
        good, bad = acts.message(body=b"a"), acts.message(body=b"")
        statuses(sender, [good, bad], "batch 1")
        sender.open_lane(harness.source, LANE)

        assert statuses(sender, [good], "batch 2") == [ACCEPTED]

        assert acts.bodies(count=1) == [b"a"]


class TestLane:
    def test_has_no_marker_before_its_first_transaction(self, harness: Harness):
        assert TransactionalSends.of(harness.open()).open_lane(harness.source, LANE) is None

    def test_has_a_marker_of_its_own(self, acts: Acts, sender: TransactionalSends, harness: Harness):
        sender.open_lane(harness.source, OTHER)
        statuses(sender, [acts.message()], "of lane 3")

        statuses(sender, [acts.message()], "of lane 4", lane=OTHER)

        assert (sender.open_lane(harness.source, LANE), sender.open_lane(harness.source, OTHER)) == ("of lane 3", "of lane 4")

    def test_takes_nothing_before_it_is_opened(self, acts: Acts, sender: TransactionalSends, harness: Harness):
        [status] = statuses(sender, [acts.message()], "batch 1", lane=OTHER)

        assert status is not ACCEPTED
        assert acts.receive() == []
        assert sender.open_lane(harness.source, OTHER) is None

    def test_shuts_its_last_holder_out(self, acts: Acts, harness: Harness, sender: TransactionalSends):
        statuses(sender, [acts.message(body=b"before")], "batch 1")
        next_holder = TransactionalSends.of(harness.open())

        marker = next_holder.open_lane(harness.source, LANE)
        late = statuses(sender, [acts.message(body=b"late")], "batch 2")

        assert marker == "batch 1"
        assert late[0] is not ACCEPTED
        assert not sender.is_lane_open(LANE)
        assert statuses(next_holder, [acts.message(body=b"after")], "batch 3") == [ACCEPTED]
        assert sorted(acts.bodies(count=2)) == [b"after", b"before"]

    def test_that_nobody_has_opened_has_no_marker(self, harness: Harness):
        assert TransactionalSends.of(harness.open()).read_lane_marker(harness.source, OTHER) is None

    def test_can_be_read_without_being_taken(self, acts: Acts, harness: Harness, sender: TransactionalSends):
        statuses(sender, [acts.message(body=b"before")], "batch 1")
        other = TransactionalSends.of(harness.open())

        seen = other.read_lane_marker(harness.source, LANE)

        assert (seen, sender.is_lane_open(LANE), other.is_lane_open(LANE)) == ("batch 1", True, False)
        assert statuses(sender, [acts.message(body=b"after")], "batch 2") == [ACCEPTED]

    def test_stays_open_after_a_transaction_that_ended_cleanly(self, acts: Acts, harness: Harness, sender: TransactionalSends):
        assert not TransactionalSends.of(harness.open()).is_lane_open(LANE)

        statuses(sender, [acts.message()], "batch 1")

        assert sender.is_lane_open(LANE)

    def test_does_not_stay_open_when_a_marker_alone_is_fenced_out(self, harness: Harness, sender: TransactionalSends):
        TransactionalSends.of(harness.open()).open_lane(harness.source, LANE)

        assert statuses(sender, [], "nothing yet") == []

        assert not sender.is_lane_open(LANE)

    def test_is_of_one_source(self, acts: Acts, harness: Harness, sender: TransactionalSends):
        statuses(sender, [acts.message()], "batch 1")

        assert TransactionalSends.of(harness.open()).open_lane("urn:uuid:0191d8a0-0000-7000-8000-000000000002", LANE) is None

        assert statuses(sender, [acts.message()], "batch 2") == [ACCEPTED]

    def test_can_be_taken_back(self, acts: Acts, harness: Harness, sender: TransactionalSends):
        TransactionalSends.of(harness.open()).open_lane(harness.source, LANE)
        sender.open_lane(harness.source, LANE)

        assert statuses(sender, [acts.message(body=b"a")], "batch 1") == [ACCEPTED]

        assert acts.bodies(count=1) == [b"a"]
