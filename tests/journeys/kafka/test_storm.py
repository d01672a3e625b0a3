"""
The storm on Kafka: less than a minute here, more by `make faults-kafka SECONDS=600`, on a cluster by `NODES=3`.

`CONTROL=` leaves out a rule (`given.py`): then messages have to be doubled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from django.db import connection

from project.servers.kafka import Cluster
from tests.journeys.kafka.given import CONTROLS
from tests.journeys.kafka.storm import DROP, TABLES, Storm
from tests.journeys.outcome import Outcome
from tests.kafka_node import JARS

SECONDS = float(os.environ.get("STORM_SECONDS", 35))
NODES = int(os.environ.get("STORM_NODES", 1))
CONTROL = os.environ.get("STORM_CONTROL", "")
PATIENCE = 120 + SECONDS / 4  # until all is sent

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(2 * SECONDS + PATIENCE + 300),
]


@pytest.fixture
def storm(tmp_path: Path) -> Iterator[Storm]:
    assert CONTROL in ("", *CONTROLS)
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(tmp_path / "nodes", NODES, jars=JARS))
        with connection.cursor() as cursor:
            cursor.execute(TABLES)
        storm = stack.enter_context(closing(Storm(cluster.nodes, tmp_path, control=CONTROL)))
        yield storm
        print(storm.processes.logs())  # noqa: T201  (pytest shows it where the test failed)
    with connection.cursor() as cursor:
        cursor.execute(DROP)


def test_a_storm_leaves_one_copy_of_each_message(storm: Storm):
    storm.play(SECONDS)
    storm.settle(PATIENCE)

    count = storm.count()
    reached = sum(storm.reached().values())
    Outcome(
        run="relays",
        broker="kafka",
        nodes=NODES,
        seconds=SECONDS,
        faults={**storm.acts, "point permitted": 0, "relay killed or stopped at a point": reached},
        messages=count["published"],
        lost=count["lost"],
        ghosts=count["rolled back and seen"],
        copies=count["doubled"],
        applied_twice=None,
        out_of_order=count["out of order"],
        settled_seconds=storm.settled_after,
    ).write()
    print("\nSTORM", json.dumps({**count, "acts": storm.acts, "reached": storm.reached()}))  # noqa: T201  (with -s)
    assert count["published"]
    assert reached >= 3  # else it was no storm
    assert (count["lost"], count["rolled back and seen"], count["out of order"]) == (0, 0, 0)
    assert (count["doubled"] > 0) is bool(CONTROL)
