"""Each command on a database with work of each kind, in a project whose ORM returns times with a zone, and in one without."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from outbox.models import Gap, Inbox, Process, State
from outbox.testing.factories import (
    BatchFactory,
    DeferredFactory,
    DelayedFactory,
    FailedDeliveryFactory,
    TicketFactory,
    message_id,
)
from tests.database_url import environment_of
from tests.outbox.management.all_commands import CALLS

pytestmark = pytest.mark.django_db(transaction=True)

# The audit is played in its own tests, with a stand-in for Spark.
COMMANDS = sorted({*CALLS} - {"outbox_archive", "outbox_audit"})


@pytest.fixture
def _filled() -> None:
    day_ago = datetime.now(UTC) - timedelta(days=1)
    TicketFactory.create_batch(2, topic__name="orders")
    DelayedFactory(topic__name="orders")
    BatchFactory(topic__name="orders", state=State.DEAD)
    BatchFactory(topic__name="orders", sent=True)
    DeferredFactory(consumer_group="cart")
    DeferredFactory(consumer_group="cart", dead=True)
    shared = {"consumer_group": "cart", "topic": "orders", "source": "s"}
    Inbox.objects.create(idempotency_key="a", message_id=message_id(), handled_at=day_ago, **shared)
    FailedDeliveryFactory(consumer_group="cart")
    Gap.objects.create(lane=1, first_number=1, last_number=2, **shared)
    Process.objects.create(kind="consumer", host="h", pid=1, consumer_group="cart", broker="default", beat_at=day_ago)


@pytest.mark.usefixtures("_filled")
@pytest.mark.parametrize("module", ["settings", "naive_settings"])
def test_every_command_ends_as_it_does_with_time_zones(module):
    environment = environment_of(f"tests.outbox.management.{module}")
    program = [sys.executable, "-m", "tests.outbox.management.all_commands", *COMMANDS]
    ended = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120)

    found = {one["command"]: one for one in map(json.loads, ended.stdout.splitlines())}

    assert {name: one["trace"] for name, one in found.items() if one["trace"]} == {}, ended.stderr
    assert sorted(found) == COMMANDS
