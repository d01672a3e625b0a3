"""
The storm over consumers on a real RocketMQ, played by `make storm-consumers BROKER=rocketmq`; pytest does not find it of itself.

It takes minutes: what a killed process held comes back after 10 s at the earliest.
"""

from __future__ import annotations

import uuid
from contextlib import closing
from pathlib import Path

import pytest

from outbox.brokers.rocketmq import RocketMQBroker
from outbox.message import TopicSpec, TopicType
from tests.journeys.consumers.given import names
from tests.journeys.consumers.storm import Storm
from tests.journeys.consumers.test_storm import PATIENCE, SECONDS, _table, play
from tests.rocketmq_node import server

__all__ = ["_table"]

pytestmark = [
    pytest.mark.rocketmq,
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(SECONDS + PATIENCE + 60),
    pytest.mark.usefixtures("_table"),
]


def test_on_rocketmq(tmp_path: Path):
    node = server()
    options = {"ENDPOINTS": node.endpoints, "NAME_SERVERS": [node.name_server]}
    told = {
        "backend": "outbox.brokers.rocketmq.RocketMQBroker",
        "options": options,
        "unique": uuid.uuid4().hex[:8],
        "invisible": 10,  # the shortest that servers take; below it they lose what they had taken for a process that died
    }
    work, steps, group = names(told)
    node.make_topic(work, TopicType.NORMAL)
    node.make_topic(steps, TopicType.FIFO, 4)
    node.make_group(group, retries=10_000)
    node.make_group(f"{group}_fifo", is_ordered=True, retries=10_000)
    topics = [TopicSpec(work, TopicType.NORMAL), TopicSpec(steps, TopicType.FIFO)]

    with closing(RocketMQBroker("default", options, topics)) as broker:
        play(Storm(told, broker, tmp_path))
