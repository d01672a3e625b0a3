"""The storm on RabbitMQ: less than a minute here, more by `make storm-rabbitmq SECONDS=600`, on a cluster by `NODES=3`."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from django.db import connection

from project.servers.rabbitmq import Cluster, RabbitMQ
from tests.journeys.rabbitmq.storm import DROP, TABLES, Count, Storm

SECONDS = float(os.environ.get("STORM_SECONDS", 50))
IS_SHORT = SECONDS < 300
NODES = int(os.environ.get("STORM_NODES", 1))
PATIENCE = 300 + SECONDS / 2  # until all is settled

# What a queue could not hand to its inlet, since a node was killed, it hands on again after three minutes. Not in a short storm.
SOON = "-rabbit dead_letter_worker_publisher_confirm_timeout 5000"

pytestmark = [
    pytest.mark.rabbitmq,
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(2 * SECONDS + PATIENCE + 300),
    pytest.mark.skipif(not RabbitMQ.is_here(), reason="There is no rabbitmq-server: apt-get install rabbitmq-server."),
]


@pytest.fixture
def storm(tmp_path: Path) -> Iterator[Storm]:
    unique = uuid.uuid4().hex[:8]
    with connection.cursor() as cursor:
        cursor.execute(TABLES)
    with Cluster(tmp_path, NODES, erlang=SOON if IS_SHORT else "") as cluster, closing(Storm(cluster, tmp_path, unique)) as storm:
        yield storm
        print(storm.processes.logs())  # noqa: T201  (pytest shows it where the test failed)
    with connection.cursor() as cursor:
        cursor.execute(DROP)


def test_a_storm_leaves_each_message_applied_once_or_a_dead_letter(storm: Storm):
    storm.play(SECONDS)
    storm.calm()
    storm.settle(PATIENCE)

    count = Count(storm)
    print("\nSTORM", json.dumps(count.report(), indent=1))  # noqa: T201  (with -s)
    count.outcome(SECONDS).write()
    assert count.wrong() == []
    assert count.published
