"""The storm on RabbitMQ: less than a minute here, more by `make storm-rabbitmq SECONDS=600`, on a cluster by `NODES=3`."""

import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from project.servers.rabbitmq import Cluster, RabbitMQ
from tests.journeys.rabbitmq.storm import TABLES, Count, Storm
from tests.journeys.storms import NODES, marks, seconds_of_storm, show
from tests.journeys.tables import tables

SECONDS = seconds_of_storm(50)
IS_SHORT = SECONDS < 300
PATIENCE = 300 + SECONDS / 2  # until all is settled

# A message that a queue could not move to its dead-letter queue, since a node was killed, is moved after three minutes.
# Not in a short storm.
SOON = "-rabbit dead_letter_worker_publisher_confirm_timeout 5000"

pytestmark = [
    *marks(SECONDS, PATIENCE),
    pytest.mark.rabbitmq,
    pytest.mark.skipif(not RabbitMQ.is_here(), reason="There is no rabbitmq-server: apt-get install rabbitmq-server."),
]


@pytest.fixture
def storm(tmp_path: Path) -> Iterator[Storm]:
    cluster = Cluster(tmp_path, NODES, erlang=SOON if IS_SHORT else "")
    with tables(TABLES), cluster, closing(Storm(cluster, tmp_path, uuid.uuid4().hex[:8])) as storm:
        yield storm


def test_a_storm_leaves_each_message_applied_once_or_a_dead_letter(storm: Storm):
    storm.play(SECONDS)
    storm.calm()
    storm.settle(PATIENCE)

    show(count := Count(storm), SECONDS)
    assert count.wrong() == []
    assert count.published
