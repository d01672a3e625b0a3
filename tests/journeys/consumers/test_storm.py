"""
The storm over consumers: for seconds here, for minutes by `make storm-consumers SECONDS=600 BROKER=rocketmq`.

On RocketMQ it takes minutes: what a killed process held comes back after 10 s at the earliest.
"""

import os
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from django.utils.module_loading import import_string

from outbox.message import TopicSpec, TopicType
from tests.journeys.consumers.given import names
from tests.journeys.consumers.storm import TABLE, Storm
from tests.journeys.storms import marks, seconds_of_storm, show
from tests.journeys.tables import tables

BROKER = os.environ.get("STORM_BROKER", "embedded")
SECONDS = seconds_of_storm(15)
PATIENCE = 240 + SECONDS  # until all is settled: a message that kills its process takes half a minute to be given up

pytestmark = [*marks(SECONDS, PATIENCE), *([] if BROKER == "embedded" else [getattr(pytest.mark, BROKER)])]


def on_embedded(work: str, steps: str, group: str) -> dict[str, Any]:
    return {"backend": "outbox.embedded.EmbeddedBroker", "options": {}}


def on_kafka(work: str, steps: str, group: str) -> dict[str, Any]:
    from tests.kafka_node import server
    from tests.outbox.brokers.kafka.cluster import create_topic

    create_topic(work, partitions=6)
    create_topic(steps, partitions=4)
    options = {"SERVERS": [server().address], "CLIENT": {"session.timeout.ms": 6000}}
    return {"backend": "outbox.brokers.kafka.KafkaBroker", "options": options}


def on_rocketmq(work: str, steps: str, group: str) -> dict[str, Any]:
    from tests.rocketmq_node import server

    node = server()
    node.make_topic(work, TopicType.NORMAL)
    node.make_topic(steps, TopicType.FIFO, 4)
    node.make_group(group, retries=10_000)
    node.make_group(f"{group}_fifo", is_ordered=True, retries=10_000)
    options = {"ENDPOINTS": node.endpoints, "NAME_SERVERS": [node.name_server]}
    # The shortest that servers take; below it they lose what they had taken for a process that died.
    return {"backend": "outbox.brokers.rocketmq.RocketMQBroker", "options": options, "invisible": 10}


BROKERS = {"embedded": on_embedded, "kafka": on_kafka, "rocketmq": on_rocketmq}


class TestStorm:
    def test_leaves_each_message_applied_once_or_a_dead_letter(self, tmp_path: Path):
        unique = {"unique": uuid.uuid4().hex[:8]}
        work, steps, group = names(unique)
        told = {**unique, **BROKERS[BROKER](work, steps, group)}
        topics = [TopicSpec(work, TopicType.NORMAL), TopicSpec(steps, TopicType.FIFO)]
        broker = import_string(told["backend"])("default", told["options"], topics)

        with tables(TABLE), closing(broker), closing(Storm(told, broker, tmp_path)) as storm:
            storm.play(SECONDS)
            storm.settle(PATIENCE)

            show(storm, SECONDS)
            assert storm.wrong() == []
