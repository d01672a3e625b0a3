"""The settings of a soak."""

import pytest
from django.core.checks import run_checks

from tests.journeys.soak.brokers import SERVERS
from tests.journeys.soak.given import names, outbox


@pytest.mark.parametrize("broker", SERVERS)
def test_give_each_broker_topics_that_it_takes(broker, settings):
    settings.OUTBOX = outbox({**SERVERS[broker]("x").given, "unique": "x"})

    assert [problem for problem in run_checks() if any(topic in problem.msg for topic in names("x")[:3])] == []
