"""The storm on Celery's tasks: half a minute for each server here, more by `make storm-celery SECONDS=600`."""

import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from project.servers.rabbitmq import RabbitMQ
from project.servers.redis import Redis
from tests.journeys.celery_storm.storm import TABLES, Count, OnRabbitMQ, OnRedis, Storm
from tests.journeys.storms import marks, seconds_of_storm, show
from tests.journeys.tables import tables

SECONDS = seconds_of_storm(35)
PATIENCE = 120 + SECONDS / 4  # until all is settled

pytestmark = marks(SECONDS, PATIENCE)


def where_it_is(server: type[RabbitMQ] | type[Redis]) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not server.is_here(), reason=f"There is no {server.package}: apt-get install {server.package}.")


@pytest.fixture(
    params=[
        pytest.param(OnRabbitMQ, marks=[pytest.mark.rabbitmq, where_it_is(RabbitMQ)], id="rabbitmq"),
        pytest.param(OnRedis, marks=[pytest.mark.redis, where_it_is(Redis)], id="redis"),
    ]
)
def storm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storm]:
    with tables(TABLES), closing(Storm(request.param, tmp_path, uuid.uuid4().hex)) as storm:
        yield storm


def test_a_storm_leaves_each_good_task_run_and_each_poisonous_one_refused(storm: Storm):
    storm.play(SECONDS)
    storm.calm()
    storm.settle(PATIENCE)

    show(count := Count(storm), SECONDS)
    assert count.wrong() == []
    assert count.refused
