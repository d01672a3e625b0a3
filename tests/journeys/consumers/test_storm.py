"""The storm over consumers: for seconds here, for minutes by `make storm-consumers SECONDS=600 BROKER=rocketmq`."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from django.db import connection

from outbox.embedded import EmbeddedBroker
from outbox.message import TopicSpec, TopicType
from tests.journeys.consumers.given import names
from tests.journeys.consumers.storm import TABLE, Storm

SECONDS = float(os.environ.get("STORM_SECONDS", 15))
PATIENCE = 240 + SECONDS  # until all is settled: a message that kills its process takes half a minute to be given up

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(SECONDS + PATIENCE + 60)]


@pytest.fixture
def _table() -> Iterator[None]:
    with connection.cursor() as cursor:
        cursor.execute(TABLE)
    yield
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE storm_effect")


def play(storm: Storm) -> None:
    """Play, wait until all is settled, and compare."""
    with closing(storm):
        storm.play(SECONDS)
        storm.settle(PATIENCE)
    storm.outcome(SECONDS).write()
    print("\n" + json.dumps(storm.report(), indent=1))  # noqa: T201  (with -s)
    assert storm.wrong() == []


@pytest.mark.usefixtures("_table")
class TestStorm:
    def test_on_the_embedded_broker(self, tmp_path: Path):
        told = {"backend": "outbox.embedded.EmbeddedBroker", "options": {}, "unique": uuid.uuid4().hex[:8]}
        work, steps, _ = names(told)
        topics = [TopicSpec(work, TopicType.NORMAL), TopicSpec(steps, TopicType.FIFO)]

        with closing(EmbeddedBroker("default", {}, topics)) as broker:
            play(Storm(told, broker, tmp_path))
