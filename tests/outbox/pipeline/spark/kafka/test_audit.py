"""The audit of what a real Kafka has, read by Spark's own source."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from django.core.management import call_command
from django.db import connection

from outbox import database
from outbox.errors import ConfigurationError
from outbox.message import TopicType
from outbox.models import Inbox, Lane, State
from outbox.pipeline.job_config import pipeline_config
from outbox.pipeline.models import RecordedTopic
from outbox.pipeline.spark.audit.run import Report, audit
from outbox.pipeline.spark.config import AuditedGroup, PipelineConfig
from outbox.pipeline.spark.errors import HistoryError
from outbox.pipeline.spark.history import open_history
from outbox.pipeline.spark.sources.postgres import copy_history
from outbox.relay.lane import HeldLane
from outbox.relay.rounds import Relay
from tests.factories import BatchFactory, MessageRowFactory, TicketFactory, TopicFactory, message_id
from tests.kafka_node import server
from tests.outbox.brokers.kafka import secured
from tests.outbox.brokers.kafka.cluster import QUIET, create_topic, delete_topic, open_broker
from tests.outbox.pipeline.spark.worlds import said

pytestmark = pytest.mark.django_db(transaction=True)

GROUP = "cart"
LANE = 1
SECONDS = 30
RETRY = f"{{}}.{GROUP}.retry"
BEFORE = datetime.now(UTC) - timedelta(hours=1)


def milliseconds(at: datetime) -> int:
    return int(at.timestamp() * 1000)


@dataclass
class Sent:
    """
    Messages of one key that the outbox has sent, numbered from 1. What Kafka has of them is up to the test.

    Args:
        servers: where they are stored, and by which settings of the client.
    """

    topic: str
    count: int
    servers: str = field(default_factory=lambda: server().address)
    client: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        row = TopicFactory(name=self.topic)
        ids = [message_id(BEFORE + timedelta(milliseconds=n)) for n in range(self.count)]
        for one in ids:
            MessageRowFactory(id=one, topic=row, created_at=BEFORE)
        sent = {"topic": row, "state": State.SENT, "lane": LANE, "sent_at": BEFORE, "claimed_at": BEFORE}
        BatchFactory(message_ids=ids, first_seq=1, **sent)
        Lane.objects.create(topic_id=row.id, lane=LANE, last_seq=self.count)
        self.ids = [str(one) for one in ids]
        with connection.cursor() as cursor:
            cursor.execute("SELECT id FROM outbox_source")
            (self.source,) = cursor.fetchone()

    def store(self, *numbers: int, at: datetime = BEFORE, retry_of: str = "") -> None:
        """
        Store records of some of the messages, in this order.

        Args:
            retry_of: the group whose retry topic they are stored in.
        """
        producer = self.producer()
        self.produce(producer, *numbers, at=at, retry_of=retry_of)
        assert producer.flush(SECONDS) == 0

    def produce(self, producer: Producer, *numbers: int, at: datetime = BEFORE, retry_of: str = "") -> None:
        topic = RETRY.format(self.topic) if retry_of else self.topic
        for number in numbers:
            named = {"ce_id": self.ids[number - 1], "ce_source": f"urn:uuid:{self.source}", "ce_lane": LANE, "ce_number": number}
            if retry_of:
                named["outbox-copy"] = json.dumps({"group": retry_of, "topic": self.topic})
            headers = [(name, str(value)) for name, value in named.items()]
            producer.produce(topic, b"{}", key="k", headers=headers, timestamp=milliseconds(at))

    def producer(self, **settings: Any) -> Producer:
        return Producer({"bootstrap.servers": self.servers, **QUIET, **self.client, **settings})

    def begin(self) -> Producer:
        """Return a producer in a transaction of its own."""
        producer = self.producer(**{"transactional.id": uuid.uuid4().hex})
        producer.init_transactions(SECONDS)
        producer.begin_transaction()
        return producer

    def handle(self, *numbers: int) -> None:
        """Write that the group has handled some of the messages."""
        for number in numbers:
            one = self.ids[number - 1]
            Inbox.objects.create(
                consumer_group=GROUP,
                dedupe_key=one,
                message_id=one,
                source=self.source,
                topic=self.topic,
                lane=LANE,
                number=number,
            )

    def finish(self, offset: int) -> None:
        """Commit how far the group has finished the topic."""
        member = Consumer({"bootstrap.servers": self.servers, "group.id": GROUP, **QUIET})
        member.commit(offsets=[TopicPartition(self.topic, 0, offset)], asynchronous=False)
        member.close()


@dataclass
class Judge:
    """Audits a topic of the real Kafka, and the group's inbox if asked to."""

    spark: Any
    settings: Any
    folder: Path
    groups: bool = False
    kind: TopicType = TopicType.NORMAL
    options: dict[str, Any] = field(default_factory=dict)

    def config(self, topic: str) -> PipelineConfig:
        options = {"SERVERS": [server().address], **self.options}
        brokers = {"kafka": {"BACKEND": "outbox.brokers.kafka.KafkaBroker", "OPTIONS": options}}
        topics = {topic: {"BROKER": "kafka", "TYPE": self.kind.value}}
        self.settings.OUTBOX = {
            **self.settings.OUTBOX,
            "BROKERS": self.settings.OUTBOX["BROKERS"] | brokers,
            "TOPICS": self.settings.OUTBOX["TOPICS"] | topics,
        }
        made = pipeline_config(settle=timedelta(minutes=1), reader="python", shuffle_partitions=2)
        [cluster] = made.kafka
        waiting = {GROUP: dict.fromkeys((topic, RETRY.format(topic)), topic)} if self.groups else {}
        groups = [AuditedGroup(GROUP, [topic])] if self.groups else []
        return replace(made, kafka=[replace(cluster, waiting=waiting)], groups=groups, business=[])

    def __call__(self, topic: str) -> Report:
        config = self.config(topic)
        copy_history(self.spark, config, str(self.folder))
        return audit(self.spark, config, open_history(self.spark, str(self.folder)))


@pytest.fixture
def judge(spark: Any, settings: Any, tmp_path: Path) -> Judge:
    return Judge(spark, settings, tmp_path)


class TestWhatARelaySent:
    def test_is_found_once_in_order_and_with_its_numbers(self, judge):
        topic = create_topic(partitions=3)
        row = TopicFactory(name=topic, type="fifo", ordered=True)
        for key in (1, 2, 3):
            TicketFactory.create_batch(10, topic=row, order_key=key)
        Relay(database.raw("default"), open_broker(topic, kind=TopicType.FIFO), HeldLane(LANE)).drain()

        report = replace(judge, kind=TopicType.FIFO)(topic)

        assert said(report) == []
        assert report.counts[topic]["broker"] == 0  # younger than the settle time
        assert report.counts[topic]["in flight"] == 30


class TestTheAudit:
    def test_names_what_kafka_has_not_has_twice_or_was_never_sent(self, judge):
        sent = Sent(create_topic(), 6)
        sent.store(1, 2, 2, 4, 6)
        Lane.objects.update(last_seq=5)

        report = judge(sent.topic)

        found = {(str(one.kind), one.first, one.last): one.ids for one in report.findings}
        assert found[("lost", 3, 3)] == (sent.ids[2],)
        assert found[("lost", 5, 5)] == (sent.ids[4],)
        assert found[("duplicated", 2, 2)] == (sent.ids[1],)
        assert ("beyond the last number", 6, 6) in found

    def test_names_what_is_out_of_order(self, judge):
        sent = Sent(create_topic(), 3)
        sent.store(1, 3, 2)

        report = replace(judge, kind=TopicType.FIFO)(sent.topic)

        assert [(kind, stage) for kind, stage, *_ in said(report)] == [("out of order", "broker")]

    def test_counts_no_copy_of_an_aborted_transaction(self, judge):
        sent = Sent(create_topic(), 3)
        aborted = sent.begin()
        sent.produce(aborted, 1, 2, 3)
        aborted.flush(SECONDS)
        aborted.abort_transaction()
        sent.store(1, 2, 3)

        assert said(judge(sent.topic)) == []

    def test_says_of_messages_behind_an_open_transaction_that_readers_wait(self, judge):
        sent = Sent(create_topic(), 3)
        sent.store(1)
        other = sent.begin()
        other.produce(sent.topic, b"of another", timestamp=milliseconds(BEFORE - timedelta(minutes=1)))
        other.flush(SECONDS)
        sent.store(2, 3)

        report = judge(sent.topic)
        other.abort_transaction()

        assert said(report) == [("late", "broker", "", 2, 3, 2)]
        assert report.findings[0].detail.startswith("behind a transaction in partition 0 that was begun at ")

    def test_does_not_call_lost_what_the_retention_has_deleted(self, judge):
        sent = Sent(create_topic(), 4)
        sent.store(1, 2)
        admin = AdminClient({"bootstrap.servers": server().address, **QUIET})
        place = TopicPartition(sent.topic, 0, 2)
        admin.delete_records([place])[place].result(SECONDS)
        sent.store(4, at=BEFORE + timedelta(minutes=1))

        assert said(judge(sent.topic)) == []

    def test_does_not_look_for_each_message_in_a_compacted_topic(self, judge):
        sent = Sent(create_topic(config={"cleanup.policy": "compact"}), 2)
        sent.store(2)

        assert said(judge(sent.topic)) == []

    def test_calls_all_of_a_topic_lost_that_was_deleted(self, judge):
        sent = Sent(create_topic(), 3)
        sent.store(1, 2, 3)
        delete_topic(sent.topic)

        assert said(judge(sent.topic)) == [("lost", "broker", "", 1, 3, 3)]

    def test_leaves_out_records_of_other_producers(self, judge):
        sent = Sent(create_topic(), 1)
        sent.store(1)
        other = sent.producer()
        other.produce(sent.topic, None, key=b"\xff", headers=[("ce_id", b"7"), ("ce_number", b"x"), ("ce_lane", None)])
        other.produce(sent.topic, b"plain")
        assert other.flush(SECONDS) == 0

        report = judge(sent.topic)

        assert (said(report), report.counts[sent.topic]["broker"]) == ([], 1)


class TestAGroup:
    def test_is_asked_for_what_it_has_finished_and_not_for_what_waits(self, judge):
        sent = Sent(create_topic(), 5)
        sent.store(1, 2, 3, 4, 5)
        sent.handle(1, 3)
        sent.finish(3)

        report = replace(judge, groups=True)(sent.topic)

        assert said(report) == [("late", "inbox", GROUP, 4, 5, 2), ("lost", "inbox", GROUP, 2, 2, 1)]
        assert report.counts[sent.topic][f"unread by {GROUP}"] == 2

    def test_has_what_waits_in_its_retry_topic(self, judge):
        sent = Sent(create_topic(), 3)
        create_topic(RETRY.format(sent.topic))
        sent.store(1, 2, 3)
        sent.handle(1)
        sent.finish(3)
        sent.store(2, retry_of=GROUP)
        sent.store(3, retry_of="another")

        report = replace(judge, groups=True)(sent.topic)

        assert said(report) == [("late", "inbox", GROUP, 2, 2, 1), ("lost", "inbox", GROUP, 3, 3, 1)]


class TestACluster:
    def test_is_read_with_the_password_of_the_settings(self, judge):
        topic = secured.create_topic()
        secured.allow(topic, secured.READ)
        Sent(topic, 2, secured.secured_server().address, secured.login("admin")).store(1, 2)
        options = {"SERVERS": [secured.secured_server().address], "CLIENT": secured.login("relay")}

        assert said(replace(judge, options=options)(topic)) == []

    def test_that_lets_nobody_read_the_topic_is_named_with_it(self, judge):
        topic = secured.create_topic()
        options = {"SERVERS": [secured.secured_server().address], "CLIENT": secured.login("relay")}

        with pytest.raises(HistoryError, match=f"Topic '{topic}' cannot be read. Allow this user Read on it."):
            replace(judge, options=options)(topic)

    def test_that_does_not_answer_is_named(self, judge, monkeypatch):
        monkeypatch.setattr("outbox.pipeline.spark.sources.kafka.ANSWER_SECONDS", 1.0)

        with pytest.raises(HistoryError, match="Broker 'kafka' cannot be read"):
            replace(judge, options={"SERVERS": ["127.0.0.1:1"]})("orders-of-nobody")


class TestTheConfiguration:
    def test_leaves_a_topic_to_the_recorder_that_records_it(self, judge, settings):
        RecordedTopic.objects.create(topic="orders-recorded", broker="kafka", consumer_group="outbox-recorder")
        judge.config("orders-of-kafka")
        settings.OUTBOX = {
            **settings.OUTBOX,
            "TOPICS": settings.OUTBOX["TOPICS"] | {"orders-recorded": {"BROKER": "kafka"}},
        }

        config = pipeline_config(settle=timedelta(minutes=1))

        assert [cluster.topics for cluster in config.kafka] == [["orders-of-kafka"]]
        assert list(config.recorded) == ["orders-recorded"]
        assert {"orders-of-kafka", "orders-recorded"} <= set(config.seen_topics)

    def test_names_the_recorder_where_spark_cannot_connect(self, judge):
        options = {"CLIENT": {"security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"}}

        with pytest.raises(ConfigurationError, match=r"Spark cannot read broker 'kafka': .*outbox_record --broker kafka"):
            replace(judge, options=options).config("orders")

    def test_is_the_same_after_it_was_written_to_a_file(self, judge):
        config = judge.config("orders-of-kafka")

        assert PipelineConfig.from_json(config.to_json()) == config


class TestTheCommand:
    def test_judges_what_kafka_has(self, judge, settings, kafka_jars):
        sent = Sent(create_topic(), 2)
        sent.store(1)
        judge.config(sent.topic)
        settings.OUTBOX = {**settings.OUTBOX, "PIPELINE": {"KAFKA_JARS": kafka_jars}}
        output = StringIO()

        with pytest.raises(SystemExit) as exit_:
            call_command("outbox_audit", settle=60, json=True, no_store=True, reader="python", stdout=output, stderr=StringIO())

        found = json.loads(output.getvalue())["findings"]
        assert (exit_.value.code, [(one["kind"], one["ids"]) for one in found]) == (1, [("lost", [sent.ids[1]])])
