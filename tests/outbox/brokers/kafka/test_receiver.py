"""Consumer groups on a real Kafka: rebalances, offsets, messages of other producers, long retries, and whose group it is."""

import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewPartitions

from outbox.brokers.base import Delivery
from outbox.brokers.kafka import KafkaBroker, member
from outbox.brokers.kafka.group_topics import STEPS
from outbox.brokers.kafka.window import MOST_OPEN
from outbox.errors import BrokerUnavailable
from outbox.message import TopicSpec, TopicType
from tests.kafka_node import server
from tests.outbox.brokers.kafka.cluster import QUIET, SECONDS, create_topic, message, new_source, read
from tests.waiting import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(120)]

HELD = timedelta(minutes=20)
MOMENT = timedelta(seconds=0.2)
SESSION = {"session.timeout.ms": 6000}
NORMAL = TopicType.NORMAL
KIP_848 = {"group.protocol": "consumer"}

Open = Callable[..., KafkaBroker]


class Clock:
    """A clock of members that a test moves."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


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
    def test_without_id_are_identified_by_their_place_for_good(self, open_member: Open, group: str):
        topic = create_topic()
        produce(topic, b"a", timestamp=1_700_000_000_123)
        mine = open_member(topic)
        [first] = receive(mine, group)

        mine.release([first])
        [again] = receive(mine, group)
        mine.retry(again, timedelta(minutes=1))

        assert first.message_id == again.message_id == f"{topic}/0/0@1700000000123"
        assert (first.queue, first.pos) == ("0", 0)

    def test_keep_their_id_value_and_place_through_a_long_retry(self, open_member: Open, group: str, clock: Clock):
        topic = create_topic()
        produce(topic, None, key=b"\xff\x00", headers=[("n", None), ("b", b"\xfe"), ("ce_type", b"OrderPaid")])
        mine = open_member(topic)
        [first] = receive(mine, group)

        mine.retry(first, timedelta(minutes=1))
        clock.now += 60
        [again] = receive(mine, group)

        assert (again.message_id, again.queue, again.pos, again.stored_at) == (first.message_id, "0", 0, first.stored_at)
        assert (again.body, again.key, again.headers) == (b"", "\\xff\x00", {"n": "", "b": "\\xfe", "ce-type": "OrderPaid"})
        assert again.delivery_count == 2

    def test_without_a_value_are_dead_letters_like_others(self, open_member: Open, group: str):
        topic = create_topic()
        produce(topic, None, key=b"k")
        mine = open_member(topic)
        [tombstone] = receive(mine, group)

        mine.dead_letter(tombstone, "no body")
        [letter] = mine.dead_letters(group)
        mine.replay(group, [letter.id])
        [again] = receive(mine, group)

        assert letter.message_id == again.message_id == tombstone.message_id
        assert (again.key, again.body) == ("k", b"")
        assert read(f"{topic}.{group}.retry")[0].value() is None

    def test_are_no_copies_of_the_group_whatever_their_headers_say(self, open_member: Open, group: str):
        topic = create_topic()
        note = b'{"group": "g", "topic": "t", "message_id": "of-another", "queue": "7", "pos": 9}'
        produce(topic, b"a", headers=[("outbox-copy", note)])
        mine = open_member(topic)

        [first] = receive(mine, group)

        assert (first.queue, first.pos, first.delivery_count) == ("0", 0, 1)
        assert first.message_id != "of-another"


class TestOffsets:
    def test_stay_behind_what_is_not_settled(self, open_member: Open, group: str):
        topic = create_topic()
        mine = open_member(topic)
        mine.send([message(topic, b"%d" % n) for n in range(5)])
        found = receive(mine, group, count=5)

        mine.ack(found[1:4])
        mine.close()

        assert bodies(receive(open_member(topic), group, count=5)) == [b"0", b"1", b"2", b"3", b"4"]

    def test_are_committed_before_a_member_leaves(self, open_member: Open, group: str):
        topic = create_topic()
        mine = open_member(topic)
        mine.send([message(topic, b"%d" % n) for n in range(5)])
        found = receive(mine, group, count=5)

        mine.ack(found[:3])
        mine.close()

        again = receive(open_member(topic), group, count=2)
        assert [(one.body, one.delivery_count) for one in again] == [(b"3", 2), (b"4", 2)]

    def test_are_those_behind_the_ends_of_transactions_when_nothing_is_left(self, open_member: Open, group: str):
        topic = create_topic()
        mine = open_member(topic)
        mine.open_lane(new_source(), 0)
        mine.send_transaction(0, [message(topic, b"a")], "[]")
        mine.ack(receive(mine, group))

        wait_until(lambda: once(mine, group) == [] and mine.backlog(group) == {topic: 0}, SECONDS)

    def test_leave_a_message_that_nobody_was_handed_its_first_delivery(self, open_member: Open, group: str):
        topic = create_topic()
        mine = open_member(topic)
        mine.send([message(topic, b"a"), message(topic, b"b")])
        receive(mine, group, limit=1)

        mine.close()

        assert [one.delivery_count for one in receive(open_member(topic), group, count=2)] == [2, 1]


class TestRebalance:
    @pytest.mark.parametrize("client", [SESSION, KIP_848], ids=["classic", "kip-848"])
    def test_neither_doubles_nor_skips_a_message(self, open_member: Open, group: str, client: dict[str, Any]):
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

    def test_takes_a_delivery_away_from_a_member_that_does_not_call(
        self, open_member: Open, group: str, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr("outbox.brokers.kafka.client.MOST_BETWEEN_POLLS", timedelta(seconds=7))
        topic = create_topic()
        slow = open_member(topic)
        slow.send([message(topic, b"a")])
        held = receive(slow, group)

        other = receive(open_member(topic), group)

        assert [(one.body, one.delivery_count) for one in other] == [(b"a", 2)]
        assert slow.ack(held) == [False]

    def test_leaves_a_delivery_that_is_renewed_with_its_member(
        self, open_member: Open, group: str, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr("outbox.brokers.kafka.client.MOST_BETWEEN_POLLS", timedelta(seconds=7))
        monkeypatch.setattr(member, "MOST_BETWEEN_POLLS", timedelta(seconds=2))
        topic = create_topic()
        slow = open_member(topic)
        slow.send([message(topic, b"a")])
        held = receive(slow, group)
        is_over = threading.Event()
        threading.Timer(10, is_over.set).start()

        while not is_over.wait(0.2):
            assert None not in slow.renew(held, HELD)

        assert slow.ack(held) == [True]
        assert once(slow, group) == []

    def test_finds_the_partitions_that_a_topic_gets_later(self, open_member: Open, group: str, monkeypatch: pytest.MonkeyPatch):
        topic = create_topic()
        mine = open_member(topic, START="latest", CLIENT={**SESSION, "topic.metadata.refresh.interval.ms": 500})
        once(mine, group)
        admin = AdminClient({"bootstrap.servers": server().address, **QUIET})
        admin.create_partitions([NewPartitions(topic, 2)])[topic].result(SECONDS)
        wait_until(lambda: len(admin.list_topics(topic, timeout=SECONDS).topics[topic].partitions) == 2, SECONDS)

        produce(topic, b"new", partition=1)

        assert bodies(receive(mine, group)) == [b"new"]


class TestPassOn:
    def test_takes_a_message_to_a_member_that_has_a_handler_for_it(
        self, open_member: Open, group: str, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(member, "KEPT_SECONDS", 0.5)
        monkeypatch.setattr(member, "AWAY_SECONDS", 1)
        topic = create_topic()
        old = open_member(topic)
        old.send([message(topic, b"new")])
        found: list[Delivery] = []

        def pass_on() -> None:
            while not found:
                for one in once(old, group):
                    old.pass_on(one, timedelta(0))

        passing = threading.Thread(target=pass_on)
        passing.start()
        found += receive(open_member(topic), group)
        passing.join(SECONDS)

        assert bodies(found) == [b"new"]

    def test_keeps_the_only_member_in_its_group(self, open_member: Open, group: str, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(member, "KEPT_SECONDS", 0.1)
        monkeypatch.setattr(member, "AWAY_SECONDS", 1000)
        topic = create_topic()
        mine = open_member(topic)
        mine.send([message(topic, b"unknown")])
        [unknown] = receive(mine, group)

        for _ in range(5):
            mine.pass_on(unknown, timedelta(0))
            [unknown] = receive(mine, group)
        mine.send([message(topic, b"known")])

        assert bodies(receive(mine, group)) == [b"known"]

    def test_is_over_when_the_message_has_gone(self, open_member: Open, group: str, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(member, "KEPT_SECONDS", 0.1)
        topic = create_topic()
        mine = open_member(topic)
        mine.send([message(topic, b"a")])
        [delivery] = receive(mine, group)
        mine.pass_on(delivery, timedelta(0))
        [again] = mine.receive(group, [topic], limit=1, invisible_for=HELD, wait=timedelta(0)) or receive(mine, group)

        mine.ack([again])

        assert [once(mine, group) for _ in range(5)] == [[]] * 5
        assert mine.backlog(group) == {topic: 0}


class TestWindow:
    def test_of_an_ordered_topic_is_not_filled_by_what_waits_behind_one_key(self, open_member: Open, group: str):
        topic = create_topic()
        mine = open_member(topic, kind=TopicType.FIFO)
        mine.send([message(topic, b"%d" % n, key="a") for n in range(MOST_OPEN + 100)])
        [head] = receive(mine, group)
        mine.retry(head, timedelta(hours=1))

        for _ in range(10):
            assert once(mine, group) == []

        [window] = [one for one in mine._members[group]._windows.values() if not one.is_retry]
        assert MOST_OPEN <= len(window.records) < MOST_OPEN + 100

    def test_goes_on_when_its_head_is_done(self, open_member: Open, group: str):
        topic = create_topic()
        mine = open_member(topic)
        mine.send([message(topic, b"%d" % n) for n in range(2 * MOST_OPEN)])
        first, *rest = receive(mine, group, count=MOST_OPEN)
        mine.ack(rest)
        before = [one for _ in range(10) for one in once(mine, group)]

        mine.ack([first])

        assert len(before) < MOST_OPEN / 2
        after = receive(mine, group, count=2 * MOST_OPEN - 1 - len(rest) - len(before))
        assert sorted(int(one.body) for one in [first, *rest, *before, *after]) == list(range(2 * MOST_OPEN))


class TestLongRetry:
    def test_is_spent_step_by_step_and_delivered_when_it_is_due(self, open_member: Open, group: str, clock: Clock):
        topic = create_topic()
        mine = open_member(topic)
        mine.send([message(topic, b"a"), message(topic, b"b")])
        first, second = receive(mine, group, count=2)
        mine.retry(first, timedelta(hours=1, minutes=1, seconds=15))
        mine.ack([second])

        for step, seconds in enumerate((3600, 60, 10), 1):
            wait_until(lambda step=step: once(mine, group) == [] and len(read(f"{topic}.{group}.retry")) == step, SECONDS)
            clock.now += seconds
        assert once(mine, group) == []
        clock.now += 5

        assert [(one.body, one.delivery_count) for one in receive(mine, group)] == [(b"a", 2)]
        steps = [record.partition() for record in read(f"{topic}.{group}.retry")]
        assert sorted(STEPS[step] for step in steps) == [10, 60, 3600]

    def test_leaves_the_group_its_other_messages_and_its_offset(self, open_member: Open, group: str, clock: Clock):
        topic = create_topic()
        mine = open_member(topic)
        mine.send([message(topic, b"a"), message(topic, b"b")])
        for one in receive(mine, group, count=2):
            mine.retry(one, timedelta(minutes=5))
        assert mine.backlog(group) == {topic: 2}

        mine.close()
        clock.now += 300

        assert sorted(bodies(receive(open_member(topic), group, count=2))) == [b"a", b"b"]


class TestOwner:
    def test_keeps_another_project_out_until_it_takes_the_group_over(self, open_member: Open, group: str):
        topic = create_topic()
        mine, theirs = open_member(topic), open_member(topic)
        mine.set_owner(group, "urn:uuid:1", "shop")
        theirs.set_owner(group, "urn:uuid:2", "depot")
        mine.send([message(topic, b"a")])
        mine.ack(receive(mine, group))

        refused = once(theirs, group)
        reason = theirs.refusals()[topic]
        with pytest.raises(BrokerUnavailable, match="still has members"):
            theirs.take_over(group)
        mine.close()
        theirs.take_over(group)
        mine.close()
        again = open_member(topic)
        again.set_owner(group, "urn:uuid:2", "depot")
        again.send([message(topic, b"b")])

        assert refused == []
        assert "'shop'" in reason
        assert "--take-over" in reason
        assert bodies(receive(again, group)) == [b"b"]

    def test_is_nobody_where_another_program_has_committed_offsets(self, open_member: Open, group: str):
        topic = create_topic()
        mine = open_member(topic)
        mine.send([message(topic, b"a")])
        mine.ack(receive(mine, group))

        theirs = open_member(topic)
        theirs.set_owner(group, "urn:uuid:2", "depot")
        mine.close()
        theirs.send([message(topic, b"b")])

        assert bodies(receive(theirs, group)) == [b"b"]


class TestCheck:
    def test_names_what_is_wrong_with_the_topics_of_a_group(self, group: str):
        topic = create_topic()
        create_topic(f"{topic}.{group}.retry", partitions=2)
        create_topic(f"{topic}.{group}.dead")
        broker = KafkaBroker("default", {"SERVERS": [server().address]}, [TopicSpec(topic, NORMAL, groups=frozenset({group}))])

        texts = [problem.text for problem in broker.check()]

        broker.close()
        assert f"Topic '{topic}.{group}.retry' needs 5 partitions: one for each step of a delay." in texts
        assert f"Topic '{topic}.{group}.dead' does not keep dead letters: its cleanup.policy is not compact." in texts

    def test_names_the_project_that_a_group_belongs_to(self, open_member: Open, group: str):
        topic = create_topic()
        mine = open_member(topic)
        mine.set_owner(group, "urn:uuid:1", "shop")
        mine.send([message(topic, b"a")])
        mine.ack(receive(mine, group))
        theirs = KafkaBroker("default", {"SERVERS": [server().address]}, [TopicSpec(topic, NORMAL, groups=frozenset({group}))])
        theirs.set_owner(group, "urn:uuid:2", "depot")

        errors = [problem for problem in theirs.check() if problem.is_error]

        theirs.close()
        assert [("'shop'" in problem.text, "--take-over" in problem.hint) for problem in errors] == [(True, True)]


class TestStart:
    def test_at_the_end_holds_for_a_topic_that_is_new_to_a_group_with_members(self, open_member: Open, group: str):
        old, new = create_topic(), create_topic()
        veteran = open_member(old)
        veteran.send([message(old, b"0")])
        veteran.ack(receive(veteran, group))
        produce(new, b"before")
        mine = open_member(old, new, START="latest")
        done = threading.Event()
        calls = threading.Thread(target=lambda: [once(veteran, group) for _ in iter(done.is_set, True)])
        calls.start()
        wait_until(lambda: once(mine, group) == [] and ("new" in str(mine.backlog(group)) or new in mine.backlog(group)), SECONDS)

        produce(new, b"after")

        assert bodies(receive(mine, group)) == [b"after"]
        done.set()
        calls.join(SECONDS)


class TestTopics:
    def test_that_are_missing_are_named_and_leave_others_alone(
        self, open_member: Open, group: str, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(member, "REFUSED_SECONDS", 0.5)
        there, missing = create_topic(), f"missing-{uuid.uuid4().hex[:8]}"
        mine = open_member(there, missing)
        mine.send([message(there, b"a")])

        assert bodies(receive(mine, group)) == [b"a"]
        assert "UNKNOWN_TOPIC_OR_PART" in mine.refusals()[missing]
        create_topic(missing)
        produce(missing, b"b")

        assert bodies(receive(mine, group)) == [b"b"]
        assert mine.refusals() == {}

    def test_of_two_groups_with_the_same_name_do_not_mix(self, open_member: Open, clock: Clock):
        short = f"a{uuid.uuid4().hex[:8]}"
        one, other = create_topic(short), create_topic(f"{short}.b")
        first, second = open_member(one), open_member(other)
        first.send([message(one, b"first")])
        second.send([message(other, b"second")])
        [mine] = receive(first, "b.c")
        [theirs] = receive(second, "c")

        first.retry(mine, timedelta(minutes=1))
        second.dead_letter(theirs, "cannot be read")
        clock.now += 60

        assert bodies(receive(first, "b.c")) == [b"first"]
        assert once(second, "c") == []
        assert (first.dead_letters("b.c"), len(second.dead_letters("c"))) == ([], 1)


class TestOutage:
    def test_of_the_broker_is_said_and_over_when_it_is_back(self, open_member: Open, group: str, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(member, "UNANSWERED_SECONDS", 0.5)
        topic = create_topic()
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
