"""Transactions on a real Kafka: what readers see, and which answers leave a lane open."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from confluent_kafka import Producer

from outbox.brokers.base import Outgoing, SendStatus
from outbox.brokers.capabilities import TransactionalSends
from outbox.brokers.kafka import KafkaBroker, lanes
from outbox.brokers.kafka.marker import marker_topic
from outbox.errors import BrokerMisconfigured, BrokerUnavailable
from outbox.message import TopicType
from tests.kafka_node import server
from tests.outbox.brokers.kafka.cluster import (
    bodies,
    create_topic,
    delete_topic,
    message,
    new_source,
    open_broker,
    read,
)
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(120)]

ACCEPTED, REFUSED, UNAVAILABLE = SendStatus.ACCEPTED, SendStatus.REFUSED, SendStatus.UNAVAILABLE
LANE, OTHER = 3, 4


@pytest.fixture
def source() -> str:
    return new_source()


@pytest.fixture
def topic() -> str:
    return create_topic(partitions=3)


@pytest.fixture
def broker(source: str, topic: str) -> KafkaBroker:
    """A broker that holds the lane."""
    broker = open_broker(topic)
    broker.open_lane(source, LANE)
    return broker


def statuses(broker, messages, marker="batch 1", lane=LANE) -> list[SendStatus]:
    return [result.status for result in broker.send_transaction(lane, messages, marker)]


class TestTransaction:
    def test_has_cloud_events_in_binary_mode(self, broker, topic):
        headers = {"ce-id": "1", "ce-type": "OrderPlaced", "content-type": "application/json", "traceparent": "00-1"}

        statuses(broker, [Outgoing("1", topic, b"{}", key="order 7", headers=headers)])

        [record] = read(topic)
        assert record.key() == b"order 7"
        assert dict(record.headers()) == {
            "ce_id": b"1",
            "ce_type": b"OrderPlaced",
            "content-type": b"application/json",
            "traceparent": b"00-1",
        }

    def test_keeps_the_order_of_a_key(self, source, topic):
        broker = open_broker(topic, kind=TopicType.FIFO)
        broker.open_lane(source, LANE)

        statuses(broker, [message(topic, str(n).encode(), key=f"k{n % 5}") for n in range(200)])

        found = read(topic)
        for key in {record.key() for record in found}:
            numbers = [int(record.value()) for record in found if record.key() == key]
            assert numbers == sorted(numbers)
        assert len(found) == 200

    def test_that_was_left_open_is_ended_by_the_next_holder(self, broker, source, topic, monkeypatch):
        statuses(broker, [message(topic, b"before")])
        monkeypatch.setattr(lanes, "_commit", lambda producer: "the process died here")

        [status] = statuses(broker, [message(topic, b"left open")], "batch 2")
        monkeypatch.undo()

        assert status is SendStatus.UNSURE
        assert open_broker().open_lane(source, LANE) == "batch 1"
        assert bodies(topic) == [b"before"]

    def test_that_was_committed_without_an_answer_is_in_the_marker(self, broker, source, topic, monkeypatch):
        commit = lanes._commit
        monkeypatch.setattr(lanes, "_commit", lambda producer: commit(producer) or "the answer was lost")

        [status] = statuses(broker, [message(topic, b"committed")], "batch 2")
        monkeypatch.undo()

        assert status is SendStatus.UNSURE
        assert not broker.is_lane_open(LANE)
        assert broker.open_lane(source, LANE) == "batch 2"
        assert bodies(topic) == [b"committed"]

    def test_that_was_committed_late_closes_its_lane(self, broker, topic, monkeypatch):
        monkeypatch.setattr(lanes, "SLOW_COMMIT", lanes.SLOW_COMMIT * 0)

        assert statuses(broker, [message(topic)]) == [ACCEPTED]

        assert not broker.is_lane_open(LANE)


class TestRejection:
    def test_of_a_message_that_is_too_large_for_its_topic_names_the_limit(self, source):
        topic = create_topic(config={"max.message.bytes": "1000"})
        broker = open_broker(topic)
        broker.open_lane(source, LANE)

        large, small = broker.send_transaction(LANE, [message(topic, b"x" * 2000), message(topic)], "batch 1")

        assert (large.status, small.status) == (REFUSED, UNAVAILABLE)
        assert f"topic {topic!r} takes 1000 (max.message.bytes)" in large.reason
        assert bodies(topic) == []
        assert statuses(broker, [message(topic, b"{}")]) == [ACCEPTED]

    def test_of_the_largest_body_does_not_happen_on_a_topic_without_settings(self, broker, topic):
        assert statuses(broker, [message(topic, b"x" * broker.max_body_bytes, key="k" * 100)]) == [ACCEPTED]

    def test_of_a_larger_body_does_not_happen_where_client_and_topic_take_it(self, source):
        topic = create_topic(config={"max.message.bytes": "3000000"})
        broker = open_broker(topic, CLIENT={"message.max.bytes": 3_000_000})
        broker.open_lane(source, LANE)

        assert broker.limits(broker.options, broker.topics[topic]).body_bytes == 3_000_000 - 16 * 1024
        assert statuses(broker, [message(topic, b"x" * broker.max_body_bytes, key="k" * 100)]) == [ACCEPTED]

    def test_of_a_message_that_fits_once_it_is_compressed_does_not_happen(self, source):
        topic = create_topic(config={"max.message.bytes": "1000"})
        broker = open_broker(topic, CLIENT={"compression.type": "gzip"})
        broker.open_lane(source, LANE)

        assert statuses(broker, [message(topic, b"x" * 2000)]) == [ACCEPTED]

    def test_of_many_small_messages_that_are_too_large_together_sends_them_one_by_one(self, source):
        topic = create_topic(config={"max.message.bytes": "1000"})
        broker = open_broker(topic)
        broker.open_lane(source, LANE)
        messages = [message(topic, b"x" * 200) for _ in range(40)]

        first = set(statuses(broker, messages))
        broker.open_lane(source, LANE)
        second = set(statuses(broker, messages))

        assert (first, second) == ({UNAVAILABLE}, {ACCEPTED})
        assert len(bodies(topic)) == 40

    def test_where_the_limit_cannot_be_asked_finds_the_one_that_is_too_large(self, source, monkeypatch):
        topic = create_topic(config={"max.message.bytes": "1000"})
        broker = open_broker(topic)
        monkeypatch.setattr(lanes.KafkaLanes, "_max_record_bytes", lambda *args: None)
        messages = [message(topic, b"{}"), message(topic, b"x" * 2000), message(topic, b"[]")]
        broker.open_lane(source, LANE)
        statuses(broker, messages)

        broker.open_lane(source, LANE)

        assert statuses(broker, messages) == [UNAVAILABLE, REFUSED, UNAVAILABLE]
        assert bodies(topic) == []

    def test_of_a_topic_that_is_missing_names_it_and_recovers(self, source, topic):
        missing = f"{topic}-missing"
        broker = open_broker(topic, missing)
        broker.open_lane(source, LANE)

        found = broker.send_transaction(LANE, [message(missing), message(topic)], "batch 1")

        assert [result.status for result in found] == [SendStatus.MISCONFIGURED, UNAVAILABLE]
        assert f"Kafka refused topic {missing!r}" in found[0].reason
        assert "Create the topic" in found[0].reason
        create_topic(missing)
        broker.open_lane(source, LANE)
        wait_until(lambda: _sends(broker, source, [message(missing), message(topic)]))
        assert (len(bodies(missing)), len(bodies(topic))) == (1, 1)


def _sends(broker, source, messages) -> bool:
    if not broker.is_lane_open(LANE):
        broker.open_lane(source, LANE)
    return statuses(broker, messages) == [ACCEPTED] * len(messages)


class TestMarker:
    def test_is_read_behind_transactions_that_were_not_committed(self, broker, source, topic, monkeypatch):
        statuses(broker, [message(topic)], "batch 1")
        monkeypatch.setattr(lanes, "_commit", lambda producer: "never asked")
        for number in range(3):
            statuses(broker, [message(topic)], f"aborted {number}")
            assert broker.open_lane(source, LANE) == "batch 1"

    def test_is_read_where_it_is_far_behind(self, source, topic, monkeypatch):
        monkeypatch.setattr("outbox.brokers.kafka.marker.TAIL", 1)
        broker = open_broker(topic)
        broker.open_lane(source, LANE)
        statuses(broker, [message(topic)], "batch 1")
        monkeypatch.setattr(lanes, "_commit", lambda producer: "never asked")
        statuses(broker, [message(topic)], "aborted")

        assert broker.open_lane(source, LANE) == "batch 1"

    def test_topic_with_too_few_partitions_is_refused(self, source):
        create_topic(marker_topic(source), partitions=2)

        with pytest.raises(BrokerMisconfigured, match=r"has 2 partitions, and lane 3 needs partition 3.*Add partitions"):
            open_broker().open_lane(source, LANE)

    def test_topic_that_was_deleted_is_made_anew_and_has_none(self, broker, source, topic):
        statuses(broker, [message(topic)])

        delete_topic(marker_topic(source))

        wait_until(lambda: _marker_now(source) == "none")


OPEN = "a transaction stays open"


def _marker_now(source: str) -> str:
    try:
        return open_broker().open_lane(source, LANE) or "none"
    except BrokerMisconfigured as error:
        return OPEN if "stays open" in str(error) else ""
    except BrokerUnavailable:
        return ""


class TestOutage:
    def test_opens_no_lane_and_says_so(self, source):
        with pytest.raises(BrokerUnavailable, match="Kafka could not look the topic"):
            open_broker(SERVERS=["127.0.0.1:1"]).open_lane(source, LANE)

    def test_in_a_transaction_is_over_when_the_broker_is_back(self, source, topic):
        """The lane opens with the marker of what readers see, or it does not open: see docs/brokers/kafka.md."""
        broker = open_broker(topic)
        wait_until(lambda: _marker_now(source))
        broker.open_lane(source, LANE)
        assert statuses(broker, [message(topic, b"before")], "batch 1") == [ACCEPTED]
        server().kill()
        with ThreadPoolExecutor(1) as threads:
            sending = threads.submit(statuses, broker, [message(topic, b"during")], "batch 2")
            server().start()  # in this thread: the server ends with the thread that started it
            during = set(sending.result())
        marker = wait_until(lambda: _marker_now(source), seconds=60)

        assert len(during) == 1
        if marker != OPEN:
            assert marker in ("batch 1", "batch 2")
            assert sorted(bodies(topic)) == ([b"before"] if marker == "batch 1" else [b"before", b"during"])

    def test_closes_the_lanes_before_the_next_transaction(self, broker, topic):
        statuses(broker, [message(topic)])

        server().kill()
        server().start()

        wait_until(lambda: not broker.is_lane_open(LANE))

    def test_that_leaves_a_transaction_open_opens_no_lane_and_says_so(self, source, topic, monkeypatch):
        """As Kafka 4.3 does; here the transaction belongs to another producer."""
        monkeypatch.setattr("outbox.brokers.kafka.reading.READ_SECONDS", 5.0)
        broker = open_broker(topic)
        broker.open_lane(source, LANE)
        other = Producer({"bootstrap.servers": server().address, "transactional.id": f"test.{source[-12:]}", "log_level": 0})
        other.init_transactions(30)
        other.begin_transaction()
        other.produce(marker_topic(source), b"{}", b"key", partition=LANE)
        other.flush(30)

        with pytest.raises(BrokerMisconfigured, match=rf"partition {LANE} of marker topic .* stays open"):
            broker.open_lane(source, LANE)

        other.abort_transaction(30)
        assert wait_until(lambda: _marker_now(source)) == "none"

    def test_of_a_frozen_server_burns_no_attempt_and_ends_with_it(self, broker, source, topic):
        assert statuses(broker, [message(topic, b"before")]) == [ACCEPTED]
        server().freeze()
        try:
            during = set(statuses(broker, [message(topic, b"during")], "batch 2"))
            with pytest.raises(BrokerUnavailable):
                broker.open_lane(source, LANE)
        finally:
            server().thaw()

        marker = wait_until(lambda: _marker_now(source), seconds=60)

        assert during <= {UNAVAILABLE, SendStatus.UNSURE}
        assert marker == "batch 1"
        assert bodies(topic) == [b"before"]
        wait_until(lambda: _sends(broker, source, [message(topic, b"after")]))
        assert sorted(bodies(topic)) == [b"after", b"before"]


class TestWithoutTransactions:
    def test_sends_one_phase_messages(self, topic):
        broker = open_broker(topic, TRANSACTIONS=False)

        found = broker.send([message(topic, b"a"), message(topic, b""), message(f"{topic}-missing"), message(topic, b"b")])

        assert not TransactionalSends.has(broker)
        assert [result.status for result in found] == [ACCEPTED, REFUSED, SendStatus.MISCONFIGURED, ACCEPTED]
        assert sorted(bodies(topic)) == [b"a", b"b"]

    def test_refuses_the_one_message_that_is_too_large(self):
        topic = create_topic(config={"max.message.bytes": "1000"})
        broker = open_broker(topic, TRANSACTIONS=False)
        messages = [message(topic, b"x" * size) for size in (10, 2000, 20, 800)]

        found = broker.send(messages)

        assert [result.status for result in found] == [ACCEPTED, REFUSED, ACCEPTED, ACCEPTED]
        assert sorted(map(len, bodies(topic))) == [10, 20, 800]


class TestFork:
    """A process that was forked with a broker, as Celery's workers are, has producers of its own."""

    def test_sends_without_transactions(self, topic):
        broker = open_broker(topic, TRANSACTIONS=False)
        broker.send([message(topic, b"parent")])

        status = _run_forked(lambda: statuses_of(broker.send([message(topic, b"child")])) == [ACCEPTED])

        assert status == 0
        assert statuses_of(broker.send([message(topic, b"parent again")])) == [ACCEPTED]
        assert sorted(bodies(topic)) == [b"child", b"parent", b"parent again"]

    def test_has_no_lane_open_until_it_opens_one(self, broker, source, topic):
        statuses(broker, [message(topic, b"parent")], "batch 1")

        def send() -> bool:
            assert not broker.is_lane_open(LANE)
            assert statuses(broker, [message(topic, b"too early")]) == [UNAVAILABLE]
            assert broker.open_lane(source, LANE) == "batch 1"
            return statuses(broker, [message(topic, b"child")], "batch 2") == [ACCEPTED]

        assert _run_forked(send) == 0
        assert statuses(broker, [message(topic, b"late")], "batch 3") != [ACCEPTED]
        assert broker.open_lane(source, LANE) == "batch 2"
        assert sorted(bodies(topic)) == [b"child", b"parent"]


def statuses_of(results) -> list[SendStatus]:
    return [result.status for result in results]


def _run_forked(work) -> int:
    """Return the exit code of a forked process: 0 if the work there is successful."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
