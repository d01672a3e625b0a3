"""The audit of what a real Kafka has, read by Spark's own source."""

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
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
from outbox.pipeline.spark import HistoryError
from outbox.pipeline.spark.audit import audit
from outbox.pipeline.spark.config import AuditedGroup, PipelineConfig
from outbox.pipeline.spark.findings import Report
from outbox.pipeline.spark.history import open_history
from outbox.pipeline.spark.postgres import copy_history
from outbox.relay.rounds import Relay
from tests.factories import BatchFactory, MessageRowFactory, TicketFactory, TopicFactory, message_id
from tests.kafka_node import server
from tests.outbox.brokers.kafka import secured
from tests.outbox.brokers.kafka.cluster import QUIET, create_topic, delete_topic, open_broker
from tests.outbox.pipeline.spark.worlds import said

pytestmark = pytest.mark.django_db(transaction=True)

GROUP = "cart"
LANE = 1
COMPACTED = 2  # messages
SECONDS = 30
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
        self.topic_id = row.id
        self.ids = [str(one) for one in ids]
        with connection.cursor() as cursor:
            cursor.execute("SELECT id FROM outbox_source")
            (self.source,) = cursor.fetchone()

    def store(self, *numbers: int, at: datetime = BEFORE) -> None:
        """Store records of some of the messages, in this order."""
        producer = self.producer()
        self.produce(producer, *numbers, at=at)
        assert producer.flush(SECONDS) == 0

    def produce(self, producer: Producer, *numbers: int, at: datetime = BEFORE) -> None:
        for number in numbers:
            named = {"ce_id": self.ids[number - 1], "ce_source": f"urn:uuid:{self.source}", "ce_lane": LANE, "ce_number": number}
            headers = [(name, str(value)) for name, value in named.items()]
            producer.produce(self.topic, b"{}", key="k", headers=headers, timestamp=milliseconds(at))

    def producer(self, **settings: Any) -> Producer:
        return Producer({"bootstrap.servers": self.servers, **QUIET, **self.client, **settings})

    @contextmanager
    def transaction(self) -> Iterator[Producer]:
        """Return a producer in a transaction of its own."""
        producer = self.producer(**{"transactional.id": uuid.uuid4().hex})
        producer.init_transactions(SECONDS)
        producer.begin_transaction()
        yield producer

    def store_as_another(self) -> None:
        """Store records of another producer, which look a little like ours."""
        producer = self.producer()
        producer.produce(self.topic, None, key=b"\xff", headers=[("ce_id", b"7"), ("ce_number", b"x"), ("ce_lane", None)])
        producer.produce(self.topic, b"plain")
        assert producer.flush(SECONDS) == 0

    def delete_before(self, offset: int) -> None:
        """Delete records, as the topic's retention does."""
        place = TopicPartition(self.topic, 0, offset)
        admin = AdminClient({"bootstrap.servers": self.servers, **QUIET})
        admin.delete_records([place])[place].result(SECONDS)

    def handle(self, *numbers: int) -> None:
        """Write that the group has handled some of the messages."""
        for number in numbers:
            one = self.ids[number - 1]
            Inbox.objects.create(
                consumer_group=GROUP,
                idempotency_key=one,
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
    """Audits topics of the real Kafka, and the group's inbox if asked to."""

    spark: Any
    settings: Any
    folder: Path
    groups: bool = False
    kind: TopicType = TopicType.NORMAL
    options: dict[str, Any] = field(default_factory=dict)

    def config(self, *topics: str) -> PipelineConfig:
        options = {"SERVERS": [server().address], **self.options}
        brokers = {"kafka": {"BACKEND": "outbox.brokers.kafka.KafkaBroker", "OPTIONS": options}}
        named = {topic: {"BROKER": "kafka", "TYPE": self.kind.value} for topic in topics}
        self.settings.OUTBOX = {
            **self.settings.OUTBOX,
            "BROKERS": self.settings.OUTBOX["BROKERS"] | brokers,
            "TOPICS": self.settings.OUTBOX["TOPICS"] | named,
        }
        made = pipeline_config(settle=timedelta(minutes=1), reader="python", shuffle_partitions=2)
        [cluster] = made.kafka
        waiting = {GROUP: list(topics)} if self.groups else {}
        groups = [AuditedGroup(GROUP, list(topics))] if self.groups else []
        return replace(made, kafka=[replace(cluster, waiting=waiting)], groups=groups, business=[])

    def __call__(self, *topics: str) -> Report:
        config = self.config(*topics)
        copy_history(self.spark, config, str(self.folder))
        return audit(self.spark, config, open_history(self.spark, str(self.folder)))


@pytest.fixture
def judge(spark: Any, settings: Any, tmp_path: Path) -> Judge:
    return Judge(spark, settings, tmp_path)


class TestAnOrderedTopic:
    def test_has_all_that_a_relay_sent_once_and_in_order_and_what_is_not_in_order_is_named(self, judge):
        topic, wrong = create_topic(partitions=3), Sent(create_topic(), 3)
        wrong.store(1, 3, 2)
        row = TopicFactory(name=topic, type="fifo", ordered=True)
        for key in (1, 2, 3):
            TicketFactory.create_batch(10, topic=row, order_key=key)
        Relay(database.raw("default"), open_broker(topic, kind=TopicType.FIFO), LANE).drain()

        report = replace(judge, kind=TopicType.FIFO)(topic, wrong.topic)

        assert [(one.topic, str(one.kind), str(one.stage)) for one in report.findings] == [
            (wrong.topic, "out of order", "broker")
        ]
        assert report.counts[topic]["broker"] == 0  # younger than the settle time
        assert report.counts[topic]["in flight"] == 30


class TestTheAudit:
    def test_judges_each_topic_by_what_kafka_has(self, judge):
        wrong, aborted, waiting, kept, compacted, deleted, shared = (
            Sent(create_topic(config={"cleanup.policy": "compact"} if count == COMPACTED else {}), count)
            for count in (6, 3, 3, 4, COMPACTED, 3, 1)
        )
        wrong.store(1, 2, 2, 4, 6)
        Lane.objects.filter(topic_id=wrong.topic_id).update(last_seq=5)
        with aborted.transaction() as producer:
            aborted.produce(producer, 1, 2, 3)
            producer.flush(SECONDS)
            producer.abort_transaction()
        aborted.store(1, 2, 3)
        kept.store(1, 2)
        kept.delete_before(2)
        kept.store(4, at=BEFORE + timedelta(minutes=1))
        compacted.store(2)
        deleted.store(1, 2, 3)
        delete_topic(deleted.topic)
        shared.store(1)
        shared.store_as_another()
        waiting.store(1)
        with waiting.transaction() as producer:
            producer.produce(waiting.topic, b"of another", timestamp=milliseconds(BEFORE - timedelta(minutes=1)))
            producer.flush(SECONDS)
            waiting.store(2, 3)

            report = judge(*(one.topic for one in (wrong, aborted, waiting, kept, compacted, deleted, shared)))

            producer.abort_transaction()
        found = {one.topic: [] for one in report.findings}
        for one in report.findings:
            found[one.topic].append((str(one.kind), str(one.stage), one.first, one.last, one.ids))
        assert sorted(found[wrong.topic]) == [
            ("beyond the last number", "outbox", 6, 6, (wrong.ids[5],)),
            ("duplicated", "broker", 2, 2, (wrong.ids[1],)),
            ("lost", "broker", 3, 3, (wrong.ids[2],)),
            ("lost", "broker", 5, 5, (wrong.ids[4],)),
        ]
        assert [one[:4] for one in found[waiting.topic]] == [("late", "broker", 2, 3)]
        assert [one[:4] for one in found[deleted.topic]] == [("lost", "broker", 1, 3)]
        assert found.keys() == {wrong.topic, waiting.topic, deleted.topic}
        [late] = [one for one in report.findings if one.topic == waiting.topic]
        assert late.detail.startswith("after an unfinished transaction in partition 0, which began at ")
        assert (report.counts[aborted.topic]["broker"], report.counts[shared.topic]["broker"]) == (3, 1)


class TestAGroup:
    def test_is_asked_for_what_it_has_finished_and_not_for_what_waits(self, judge):
        sent = Sent(create_topic(), 5)
        sent.store(1, 2, 3, 4, 5)
        sent.handle(1, 3)
        sent.finish(3)

        report = replace(judge, groups=True)(sent.topic)

        found = {(one.topic, str(one.kind), str(one.stage), one.first, one.last) for one in report.findings}
        assert found == {
            (sent.topic, "late", "inbox", 4, 5),
            (sent.topic, "lost", "inbox", 2, 2),
        }
        assert report.counts[sent.topic][f"unread by {GROUP}"] == 2


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
        monkeypatch.setattr("outbox.pipeline.spark.kafka.ANSWER_SECONDS", 1.0)

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
