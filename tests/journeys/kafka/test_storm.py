"""
The storm on Kafka: less than a minute here, more by `make faults-kafka SECONDS=600`, on a cluster by `NODES=3`.

`CONTROL=` leaves out a rule (`given.py`): then messages have to be doubled.
"""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from project.servers.kafka import Cluster
from tests.journeys.kafka.given import CONTROLS
from tests.journeys.kafka.storm import TABLES, Count, Storm
from tests.journeys.storms import NODES, marks, seconds_of_storm, show
from tests.journeys.tables import tables
from tests.kafka_node import JARS

SECONDS = seconds_of_storm(35)
CONTROL = os.environ.get("STORM_CONTROL", "")
PATIENCE = 120 + SECONDS / 4  # until all is sent

pytestmark = [*marks(SECONDS, PATIENCE), pytest.mark.kafka]


@pytest.fixture
def storm(tmp_path: Path) -> Iterator[Storm]:
    assert CONTROL in ("", *CONTROLS)
    cluster = Cluster(tmp_path / "nodes", NODES, jars=JARS)
    with tables(TABLES), cluster, closing(Storm(cluster.nodes, tmp_path, control=CONTROL)) as storm:
        yield storm


def test_a_storm_leaves_one_copy_of_each_message(storm: Storm):
    storm.play(SECONDS)
    storm.calm()
    storm.settle(PATIENCE)

    show(count := Count(storm), SECONDS)
    assert count.published
    assert count.reached >= 3  # else it was no storm
    assert (count.lost, count.ghosts, count.out_of_order) == (set(), set(), 0)
    assert bool(count.doubled) is bool(CONTROL)
