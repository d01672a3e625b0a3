"""The storm over consumers on a real Kafka, played by `make storm-consumers BROKER=kafka`; pytest does not find it of itself."""

from __future__ import annotations

import uuid
from contextlib import closing
from pathlib import Path

import pytest

from outbox.brokers.kafka import KafkaBroker
from outbox.message import TopicSpec, TopicType
from tests.journeys.consumers.given import names
from tests.journeys.consumers.storm import Storm
from tests.journeys.consumers.test_storm import PATIENCE, SECONDS, _table, play
from tests.kafka_node import server
from tests.outbox.brokers.kafka.cluster import create_topic

__all__ = ["_table"]

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(SECONDS + PATIENCE + 60),
    pytest.mark.usefixtures("_table"),
]


def test_on_kafka(tmp_path: Path):
    options = {"SERVERS": [server().address], "CLIENT": {"session.timeout.ms": 6000}}
    told = {"backend": "outbox.brokers.kafka.KafkaBroker", "options": options, "unique": uuid.uuid4().hex[:8]}
    work, steps, _ = names(told)
    create_topic(work, partitions=6)
    create_topic(steps, partitions=4)

    topics = [TopicSpec(work, TopicType.NORMAL), TopicSpec(steps, TopicType.FIFO)]
    with closing(KafkaBroker("default", options, topics)) as broker:
        play(Storm(told, broker, tmp_path))
