"""The storm on Celery's tasks: half a minute for each server here, more by `make storm-celery SECONDS=600`."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from django.db import connection

from project.servers.rabbitmq import RabbitMQ
from project.servers.redis import Redis
from tests.journeys.celery_storm.storm import DROP, TABLES, Count, OnRabbitMQ, OnRedis, Storm

SECONDS = float(os.environ.get("STORM_SECONDS", 35))
PATIENCE = 120 + SECONDS / 4  # until all is settled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(2 * SECONDS + PATIENCE + 200),
]


def where_it_is(server: type[RabbitMQ] | type[Redis]) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not server.is_here(), reason=f"There is no {server.package}: apt-get install {server.package}.")


@pytest.fixture(
    params=[
        pytest.param(OnRabbitMQ, marks=[pytest.mark.rabbitmq, where_it_is(RabbitMQ)], id="rabbitmq"),
        pytest.param(OnRedis, marks=[pytest.mark.redis, where_it_is(Redis)], id="redis"),
    ]
)
def storm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storm]:
    with connection.cursor() as cursor:
        cursor.execute(TABLES)
    with closing(Storm(request.param, tmp_path, uuid.uuid4().hex)) as storm:
        yield storm
        print(storm.processes.logs())  # noqa: T201  (pytest shows it where the test failed)
    with connection.cursor() as cursor:
        cursor.execute(DROP)


def test_a_storm_leaves_each_good_task_run_and_each_poisonous_one_refused(storm: Storm):
    storm.play(SECONDS)
    storm.calm()
    storm.settle(PATIENCE)

    count = Count(storm)
    print("\nSTORM", json.dumps(count.report(), indent=1))  # noqa: T201  (with -s)
    count.outcome(SECONDS).write()
    assert count.wrong() == []
    assert count.refused
