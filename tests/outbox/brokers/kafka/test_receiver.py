"""Consumer groups on a real Kafka: hands, offsets, rebalances, messages of other producers, and whose group it is."""

import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions

from outbox.brokers.base import Delivery
from outbox.brokers.kafka import KafkaBroker, receiver
from outbox.brokers.kafka.offset_notes import OffsetNote
from outbox.brokers.kafka.partition import HeldPartition
from outbox.brokers.kafka.receiver import GroupMember
from outbox.errors import BrokerUnavailable
from outbox.message import TopicSpec, TopicType
from tests.clock import Clock
from tests.kafka_node import server
from tests.outbox.brokers.kafka.cluster import QUIET, SECONDS, create_topic, delete_topic, message, new_source
from tests.outbox.brokers.kafka.raw_records import produce_with_header
from tests.waiting import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(120)]

HELD = timedelta(minutes=20)
MOMENT = timedelta(seconds=0.2)
SESSION = {"session.timeout.ms": 6000}
NORMAL = TopicType.NORMAL
KIP_848 = {"group.protocol": "consumer"}

Open = Callable[..., KafkaBroker]


@pytest.fixture
def clock() -> Clock:
    return Clock(1_800_000_000.0)


@pytest.fixture
def open_member(clock: Clock) -> Iterator[Open]:
    opened: list[KafkaBroker] = []

    def open_member(*topics: str, kind: TopicType = TopicType.NORMAL, **options: Any) -> KafkaBroker:
        options = {"SERVERS": [server().address], "CLIENT": SESSION, **options}
        opened.append(KafkaBroker("default", options, [TopicSpec(topic, kind) for topic in topics], clock=clock))
        return opened[-1]

    yield open_member
    for one in opened:
        one.close()


@pytest.fixture
def topic() -> str:
    return create_topic()


@pytest.fixture
def mine(open_member: Open, topic: str) -> KafkaBroker:
    return open_member(topic)


@pytest.fixture
def group() -> str:
    return f"group-{uuid.uuid4().hex[:8]}"


def receive(broker: KafkaBroker, group: str, *, count: int = 1, limit: int = 100) -> list[Delivery]:
    """Receive messages until there are `count`."""
    found: list[Delivery] = []
    wait_until(lambda: found.extend(once(broker, group, limit=limit)) or len(found) >= count, SECONDS)
    return found


def once(broker: KafkaBroker, group: str, *, limit: int = 100) -> list[Delivery]:
    return broker.receive(group, list(broker.topics), limit=limit, invisible_for=HELD, wait=MOMENT)


def produce(topic: str, value: bytes | None, **fields: Any) -> None:
    """Store a record as any other program would."""
    producer = Producer({"bootstrap.servers": server().address, **QUIET})
    producer.produce(topic, value, **fields)
    assert producer.flush(SECONDS) == 0


def bodies(deliveries: list[Delivery]) -> list[bytes]:
    return [one.body for one in deliveries]


class TestMessagesOfOthers:
    def test_without_id_are_identified_by_their_place_for_good(self, topic, mine, group):
        produce(topic, b"a", timestamp=1_700_000_000_123)
        [first] = receive(mine, group)

        mine.release([first])
        [again] = receive(mine, group)

        assert first.message_id == again.message_id == f"{topic}/0/0@1700000000123"
        assert (first.queue, first.pos) == ("0", 0)

    def test_are_read_whatever_they_have(self, open_member, group):
        topic = create_topic(config={"message.timestamp.after.max.ms": str(2**63 - 1)})
        headers = [("n", None), ("b", b"\xfe"), ("ce_type", b"OrderPaid")]
        produce(topic, None, key=b"\xff\x00", headers=headers, timestamp=1_700_000_000_123_456)

        [tombstone] = receive(open_member(topic), group)

        assert (tombstone.body, tombstone.key, tombstone.stored_at) == (b"", "\\xff\x00", None)
        assert tombstone.headers == {"n": "", "b": "\\xfe", "ce-type": "OrderPaid"}

    def test_with_headers_that_cannot_be_read_have_no_id_and_leave_others_alone(self, topic, mine, group):
        mine.send([message(topic) for _ in range(100)])
        mine.ack(receive(mine, group, count=100))  # the interpreter has specialized its calls by now
        produce_with_header(topic, b"b\xffd")
        produce(topic, b"next")

        [odd, other] = receive(mine, group, count=2)
        mine.release([odd, other])
        again = receive(mine, group, count=2)

        assert (odd.message_id, odd.body, odd.pos) == ("", b"body", 100)
        assert odd.headers == {"outbox-unreadable": "The name of a header is not UTF-8."}
        assert other.body == b"next"
        assert [one.message_id for one in again] == ["", other.message_id]


class TestOffsets:
    def test_stay_behind_what_is_not_settled(self, open_member, topic, mine, group):
        mine.send([message(topic, b"%d" % n) for n in range(5)])
        found = receive(mine, group, count=5)

        mine.ack(found[1:4])
        mine.close()

        assert bodies(receive(open_member(topic), group, count=5)) == [b"0", b"1", b"2", b"3", b"4"]

    def test_are_committed_before_a_member_leaves(self, open_member, topic, mine, group):
        mine.send([message(topic, b"%d" % n) for n in range(5)])
        found = receive(mine, group, count=5)

        mine.ack(found[:3])
        mine.close()

        again = receive(open_member(topic), group, count=2)
        assert [(one.body, one.delivery_count) for one in again] == [(b"3", 2), (b"4", 2)]

    def test_are_those_behind_the_ends_of_transactions_when_nothing_is_left(self, topic, mine, group):
        mine.open_lane(new_source(), 0)
        mine.send_transaction(0, [message(topic, b"a")], "[]")
        mine.ack(receive(mine, group))

        wait_until(lambda: once(mine, group) == [] and mine.backlog(group).waiting == {topic: 0}, SECONDS)

    def test_leave_a_message_that_nobody_was_handed_its_first_delivery(self, open_member, topic, mine, group):
        mine.send([message(topic, b"a"), message(topic, b"b")])
        receive(mine, group, limit=1)

        mine.close()

        assert [one.delivery_count for one in receive(open_member(topic), group, count=2)] == [2, 1]


class TestHand:
    def test_is_of_all_partitions_and_no_longer_than_the_limit(self, open_member, group):
        topic = create_topic(partitions=4)
        mine = open_member(topic, kind=TopicType.FIFO)
        mine.send([message(topic, key=str(n)) for n in range(100)])
        seen: list[Delivery] = []

        while len(seen) < 100:
            hand = receive(mine, group, limit=30)
            assert len(hand) <= 30
            mine.ack(hand)
            seen += hand

        assert len({one.message_id for one in seen}) == 100
        assert len({one.queue for one in seen[:60]}) > 1

    def test_of_an_ordered_partition_is_the_next_one_when_all_of_it_has_ended(self, open_member, topic, group):
        mine = open_member(topic, kind=TopicType.FIFO)
        mine.send([message(topic, b"%d" % n, key="ab"[n % 2]) for n in range(1500)])
        hand = receive(mine, group, count=32, limit=32)

        mine.ack(hand[1:])
        behind = [once(mine, group, limit=32) for _ in range(5)]
        open_records = len(partition_of(mine, group).records)
        mine.ack(hand[:1])

        assert bodies(hand) == [b"%d" % n for n in range(32)]
        assert behind == [[]] * 5
        assert open_records <= 64
        assert bodies(receive(mine, group, count=32, limit=32)) == [b"%d" % n for n in range(32, 64)]

    def test_goes_on_behind_what_is_held_of_a_topic_without_order_up_to_its_limit(self, topic, mine, group):
        mine.send([message(topic, b"%d" % n) for n in range(100)])
        first, *rest = receive(mine, group, count=32, limit=32)

        mine.ack(rest)
        behind = [one for _ in range(5) for one in once(mine, group, limit=32)]
        mine.ack([first])

        assert behind == []
        assert len(receive(mine, group, count=32, limit=32)) == 32

    def test_that_was_released_begins_again_at_its_first_message_that_is_not_acknowledged(self, open_member, topic, group):
        mine = open_member(topic, kind=TopicType.FIFO)
        mine.send([message(topic, b"%d" % n, key="a") for n in range(6)])
        hand = receive(mine, group, count=4, limit=4)

        mine.ack(hand[:2])
        mine.release(hand[2:])
        again = receive(mine, group, count=4, limit=4)

        assert [(one.body, one.delivery_count) for one in again] == [(b"2", 2), (b"3", 2), (b"4", 1), (b"5", 1)]
        assert mine.ack(hand[2:]) == [False, False]

    def test_is_of_the_topics_that_are_asked_for(self, open_member, group):
        paused, other = create_topic(), create_topic()
        mine = open_member(paused, other)
        mine.send([message(topic, b"%d" % n) for topic in (paused, other) for n in range(200)])
        mine.ack(receive(mine, group, limit=20))
        wait_until(lambda: len(mine._members[group]._partitions) == 2 and mine.ack(once(mine, group, limit=20)), SECONDS)

        found: list[Delivery] = []
        while len([one for one in found if one.topic == other]) < 100:
            hand = mine.receive(group, [other], limit=20, invisible_for=HELD, wait=MOMENT)
            found += hand
            mine.ack(hand)

        assert {one.topic for one in found} == {other}
        assert len(mine._members[group]._partitions[paused, 0].records) <= 40
        assert receive(mine, group, limit=20)


class TestInUse:
    """The metadata of a committed offset says which records may have been handed out."""

    def test_is_committed_before_the_first_record_is_handed_out(self, topic, mine, group):
        mine.send([message(topic) for _ in range(10)])
        wait_until(lambda: once(mine, group, limit=4), SECONDS)

        assert noted(topic, group) == (0, 4)

    def test_ends_where_commits_fail(self, topic, mine, group, monkeypatch):
        mine.send([message(topic, b"%d" % n) for n in range(10)])
        hand = receive(mine, group, count=4, limit=4)
        monkeypatch.setattr(GroupMember, "_commit", lambda self, partitions: set())

        mine.ack(hand)
        behind = [one for _ in range(5) for one in once(mine, group, limit=4)]
        monkeypatch.undo()

        assert behind == []
        assert bodies(receive(mine, group, count=4, limit=4)) == [b"4", b"5", b"6", b"7"]

    def test_of_a_killed_member_is_what_its_successor_takes_for_redelivered(self, open_member, topic, group):
        killed = open_member(topic)
        killed.send([message(topic) for _ in range(10)])
        killed.ack(receive(killed, group, count=4, limit=4)[:1])
        forget(killed, group)

        again = receive(open_member(topic), group, count=9, limit=9)

        assert [one.delivery_count for one in again] == [2, 2, 2, 2, 1, 1, 1, 1, 1]

    def test_that_was_inherited_outlasts_a_member_that_did_not_come_so_far(self, open_member, topic, group):
        killed = open_member(topic)
        killed.send([message(topic) for _ in range(10)])
        receive(killed, group, count=4, limit=4)
        forget(killed, group)
        second = open_member(topic)
        second.ack(receive(second, group, limit=1))

        second.close()

        again = receive(open_member(topic), group, count=9, limit=9)
        assert [one.delivery_count for one in again] == [2, 2, 2, 1, 1, 1, 1, 1, 1]

    def test_is_over_when_a_member_leaves_with_nothing_open(self, topic, mine, group):
        mine.send([message(topic) for _ in range(4)])
        mine.ack(receive(mine, group, count=4, limit=4))

        mine.close()

        assert noted(topic, group) == (4, 0)

    def test_is_over_when_a_partition_is_idle(self, open_member, topic, group, monkeypatch):
        monkeypatch.setattr(receiver, "IDLE_SECONDS", 0.5)
        killed = open_member(topic)
        killed.send([message(topic)])
        killed.ack(receive(killed, group, limit=4))
        forget(killed, group)
        assert noted(topic, group) == (1, 5)

        heir = open_member(topic)

        wait_until(lambda: once(heir, group) == [] and noted(topic, group) == (1, 0), SECONDS)


def partition_of(broker: KafkaBroker, group: str) -> HeldPartition:
    [partition] = broker._members[group]._partitions.values()
    return partition


def noted(topic: str, group: str) -> tuple[int, int]:
    """Return the committed offset of the first partition, and until where it is in use."""
    place = committed(topic, group)
    return place.offset, OffsetNote.read(place.metadata).handed_out_before


def committed(topic: str, group: str) -> TopicPartition:
    """Return the committed offset of the first partition, with its metadata."""
    consumer = Consumer({"bootstrap.servers": server().address, "group.id": group, **QUIET})
    [place] = consumer.committed([TopicPartition(topic, 0)], timeout=SECONDS)
    consumer.close()
    return place


def commit(place: TopicPartition, group: str) -> None:
    consumer = Consumer({"bootstrap.servers": server().address, "group.id": group, **QUIET})
    place = TopicPartition(place.topic, place.partition, place.offset, place.metadata)
    consumer.commit(offsets=[place], asynchronous=False)
    consumer.close()


def forget(broker: KafkaBroker, group: str) -> None:
    """End the member of a group as its death would: it commits nothing more, and its partitions go to others at once."""
    killed = broker._members[group]
    killed._partitions.clear()
    killed.close()


class TestRebalance:
    @pytest.mark.parametrize("client", [SESSION, KIP_848], ids=["classic", "kip-848"])
    def test_neither_doubles_nor_skips_a_message(self, open_member, group, client):
        topic = create_topic(partitions=4)
        sender = open_member(topic)
        seen: list[str] = []
        sent: list[str] = []
        late: list[str] = []

        def work(rounds: int) -> None:
            mine = open_member(topic, CLIENT=client)
            for _ in range(rounds):
                found = once(mine, group, limit=5)
                seen.extend(one.message_id for one in found)
                late.extend(one.message_id for one, is_done in zip(found, mine.ack(found), strict=True) if not is_done)
            mine.close()

        members = [threading.Thread(target=work, args=[rounds]) for rounds in (20, 60, 40)]
        for one in members:
            one.start()
            messages = [message(topic, key=str(n)) for n in range(100)]
            sender.send(messages)
            sent += [one.message_id for one in messages]
        for one in members:
            one.join(SECONDS)
        rest = open_member(topic, CLIENT=client)
        while len(set(seen)) < len(sent):
            found = receive(rest, group)
            seen += [one.message_id for one in found]
            rest.ack(found)

        assert set(seen) == set(sent)
        assert len(seen) <= len(sent) + len(late)

    def test_takes_a_delivery_away_from_a_member_that_does_not_call(self, open_member, topic, group, monkeypatch):
        monkeypatch.setattr("outbox.brokers.kafka.client.MAX_POLL_INTERVAL", timedelta(seconds=7))
        slow = open_member(topic)
        slow.send([message(topic, b"a")])
        held = receive(slow, group)

        other = receive(open_member(topic), group)

        assert [(one.body, one.delivery_count) for one in other] == [(b"a", 2)]
        assert slow.ack(held) == [False]

    def test_leaves_a_delivery_that_is_renewed_with_its_member(self, open_member, topic, group, monkeypatch):
        monkeypatch.setattr("outbox.brokers.kafka.client.MAX_POLL_INTERVAL", timedelta(seconds=7))
        monkeypatch.setattr(receiver, "MAX_POLL_INTERVAL", timedelta(seconds=2))
        slow = open_member(topic)
        slow.send([message(topic, b"a")])
        held = receive(slow, group)
        is_over = threading.Event()
        threading.Timer(10, is_over.set).start()

        while not is_over.wait(0.2):
            assert None not in slow.renew(held, HELD)

        assert slow.ack(held) == [True]
        assert once(slow, group) == []

    def test_finds_the_partitions_that_a_topic_gets_later(self, open_member, topic, group, monkeypatch):
        mine = open_member(topic, START="latest", CLIENT={**SESSION, "topic.metadata.refresh.interval.ms": 500})
        once(mine, group)
        admin = AdminClient({"bootstrap.servers": server().address, **QUIET})
        admin.create_partitions([NewPartitions(topic, 2)])[topic].result(SECONDS)
        wait_until(lambda: len(admin.list_topics(topic, timeout=SECONDS).topics[topic].partitions) == 2, SECONDS)

        produce(topic, b"new", partition=1)

        assert bodies(receive(mine, group)) == [b"new"]


class TestGroup:
    def test_of_members_that_share_partitions_out_in_another_way_is_named(self, open_member, topic, group):
        theirs = Consumer(
            {
                "bootstrap.servers": server().address,
                "group.id": group,
                "partition.assignment.strategy": "range",
                **SESSION,
                **QUIET,
            }
        )
        theirs.subscribe([topic])
        wait_until(lambda: theirs.poll(0.1) is None and theirs.assignment(), SECONDS)
        mine = open_member(topic)

        named = wait_until(lambda: theirs.poll(0.1) or trouble(mine, group), SECONDS)
        theirs.close()
        mine.send([message(topic, b"a")])

        assert "INCONSISTENT_GROUP_PROTOCOL" in named
        assert bodies(wait_until(lambda: trouble(mine, group) == "" and receive(mine, group), SECONDS)) == [b"a"]

    def test_whose_member_has_failed_for_good_is_named_each_time(self, open_member, topic, group):
        mine = open_member(topic, CLIENT={**KIP_848, "group.remote.assignor": "nonsense"})

        named = [wait_until(lambda: trouble(mine, group), SECONDS) for _ in range(2)]

        assert all("assignor" in text for text in named), named

    def test_is_joined_again_by_a_member_that_another_one_has_fenced_out(self, open_member, topic, group):
        mine, other = (open_member(topic, CLIENT={**SESSION, "group.instance.id": "shop"}) for _ in range(2))
        wait_until(lambda: once(mine, group) == [] and mine._members[group]._partitions, SECONDS)
        wait_until(lambda: once(other, group) == [] and other._members[group]._partitions, SECONDS)

        named = wait_until(lambda: trouble(mine, group), SECONDS)
        other.close()
        mine.send([message(topic, b"a")])

        assert "group.instance.id" in named
        assert bodies(receive(mine, group)) == [b"a"]


def trouble(broker: KafkaBroker, group: str) -> str:
    """Receive nothing; return the error."""
    try:
        assert once(broker, group) == []
    except BrokerUnavailable as error:
        return str(error)
    return ""


class TestOwner:
    def test_cannot_be_taken_over_while_the_group_has_members(self, open_member, topic, group):
        mine, theirs = open_member(topic), open_member(topic)
        mine.set_owner(group, "urn:uuid:1", "shop")
        mine.send([message(topic, b"a")])
        mine.ack(receive(mine, group))

        with pytest.raises(BrokerUnavailable, match="still has members"):
            theirs.set_owner(group, "urn:uuid:2", "depot", take_over=True)

    def test_is_nobody_where_another_program_has_committed_offsets(self, open_member, topic, mine, group):
        mine.send([message(topic, b"a")])
        mine.ack(receive(mine, group))

        theirs = open_member(topic)
        theirs.set_owner(group, "urn:uuid:2", "depot")
        mine.close()
        theirs.send([message(topic, b"b")])

        assert bodies(receive(theirs, group)) == [b"b"]


class TestStart:
    def test_at_the_end_holds_for_a_topic_that_is_new_to_a_group_with_members(self, open_member, group):
        old, new = create_topic(), create_topic()
        veteran = open_member(old)
        veteran.send([message(old, b"0")])
        veteran.ack(receive(veteran, group))
        produce(new, b"before")
        mine = open_member(old, new, START="latest")
        done = threading.Event()
        calls = threading.Thread(target=lambda: [once(veteran, group) for _ in iter(done.is_set, True)])
        calls.start()
        wait_until(
            lambda: once(mine, group) == [] and ("new" in str(mine.backlog(group).waiting) or new in mine.backlog(group).waiting),
            SECONDS,
        )

        produce(new, b"after")

        assert bodies(receive(mine, group)) == [b"after"]
        done.set()
        calls.join(SECONDS)

    def test_at_the_end_is_not_for_a_group_whose_offsets_were_deleted(self, open_member, topic, group):
        produce(topic, b"meanwhile")
        mine = open_member(topic, START="latest")
        mine.set_owner(group, "urn:uuid:1", "shop", known_topics=[topic])

        assert bodies(receive(mine, group)) == [b"meanwhile"]


class TestTopics:
    def test_that_are_missing_are_named_and_leave_others_alone(self, open_member, group, monkeypatch):
        monkeypatch.setattr(receiver, "REFUSED_SECONDS", 0.5)
        there, missing = create_topic(), f"missing-{uuid.uuid4().hex[:8]}"
        mine = open_member(there, missing)
        mine.send([message(there, b"a")])

        assert bodies(receive(mine, group)) == [b"a"]
        assert "UNKNOWN_TOPIC_OR_PART" in mine.refusals[missing]
        create_topic(missing)
        produce(missing, b"b")

        assert bodies(receive(mine, group)) == [b"b"]
        assert mine.refusals == {}

    def test_that_are_deleted_and_created_again_are_read_from_their_start(self, topic, mine, group):
        mine.send([message(topic, b"old") for _ in range(5)])
        mine.ack(receive(mine, group, count=5))

        delete_topic(topic)
        wait_until(lambda: _is_created(topic), SECONDS)
        for body in (b"1", b"2"):
            produce(topic, body)

        found = receive(mine, group, count=2)

        assert bodies(found) == [b"1", b"2"]
        assert noted(topic, group)[0] == 0

    @pytest.mark.parametrize("is_restarted", [False, True], ids=["live", "restarted"])
    def test_that_have_more_records_than_before_are_read_from_their_start(
        self, open_member, topic, group, monkeypatch, caplog, is_restarted
    ):
        monkeypatch.setattr(receiver, "TOPICS_SECONDS", 0.5)
        mine = open_member(topic)
        mine.send([message(topic, b"old") for _ in range(5)])
        mine.ack(receive(mine, group, count=5))
        before = committed(topic, group)
        if is_restarted:
            mine.close()
        delete_topic(topic)
        wait_until(lambda: _is_created(topic), SECONDS)
        for number in range(10):
            produce(topic, b"%d" % number)
        if is_restarted:  # as a member does that has not learned of it
            commit(before, group)
            mine = open_member(topic)

        found: set[bytes] = set()
        wait_until(lambda: found.update(bodies(once(mine, group))) or len(found) == 10, SECONDS)

        assert found == {b"%d" % number for number in range(10)}
        assert f"Topic {topic!r} was deleted and created again" in caplog.text

    def test_with_a_transaction_that_stays_open_are_named(self, topic, mine, group, monkeypatch, clock):
        monkeypatch.setattr(receiver, "TOPICS_SECONDS", 0.2)
        theirs = Producer({"bootstrap.servers": server().address, "transactional.id": uuid.uuid4().hex, **QUIET})
        theirs.init_transactions(SECONDS)
        theirs.begin_transaction()
        theirs.produce(topic, b"theirs")
        theirs.flush(SECONDS)
        mine.send([message(topic, b"ours")])
        wait_until(lambda: once(mine, group) == [] and mine._members[group]._open_transactions)
        before = mine.refusals
        clock.now += 61

        named = wait_until(lambda: once(mine, group) == [] and mine.refusals.get(topic))
        theirs.commit_transaction(SECONDS)
        found = receive(mine, group, count=2)
        mine.ack(found)

        assert before == {}
        assert f"open in partition 0 of topic {topic!r} since 2027-01-15 08:00:00 UTC or before, at offset 0" in named
        assert bodies(found) == [b"theirs", b"ours"]
        assert wait_until(lambda: once(mine, group) == [] and mine.refusals == {})


def _is_created(topic: str) -> bool:
    """Create a topic; Kafka refuses it while one of the same name is being deleted."""
    try:
        return bool(create_topic(topic))
    except KafkaException:
        return False


class TestOutage:
    def test_of_the_broker_is_said_and_over_when_it_is_back(self, open_member, topic, group, monkeypatch):
        monkeypatch.setattr(receiver, "UNANSWERED_SECONDS", 0.5)
        mine = open_member(topic)
        mine.send([message(topic, b"a")])
        mine.ack(receive(mine, group))

        server().kill()
        with pytest.raises(BrokerUnavailable):
            receive(mine, group)
        server().start()
        mine.close()
        mine = open_member(topic)
        wait_until(lambda: mine.send([message(topic, b"b")])[0].status == "accepted", SECONDS)

        def received() -> list[bytes]:
            try:
                return bodies(once(mine, group))
            except BrokerUnavailable:
                return []

        found: list[bytes] = []
        wait_until(lambda: found.extend(received()) or b"b" in found, SECONDS)
        assert b"a" not in found
