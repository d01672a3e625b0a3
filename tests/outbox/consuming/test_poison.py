"""
Messages whose handling ends its process, or raises what no `except Exception` catches: each becomes a dead letter after its
limit, and its fellows are applied meanwhile. Real processes, which are started again as a supervisor does.
"""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from outbox.brokers.base import Outgoing
from outbox.embedded import EmbeddedBroker
from outbox.message import Header, TopicSpec, TopicType
from outbox.models import FailedDelivery
from tests.database_url import environment_of
from tests.factories import message_id
from tests.outbox.consuming.deliveries import applied, errors
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]

FELLOWS = 15


class Supervisor:
    """Keeps one process of the group running, however often it ends."""

    def __init__(self) -> None:
        self.started = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.environment = environment_of("tests.outbox.consuming.poison.settings")

    def see_to_it(self) -> None:
        if self._process is None or self._process.poll() is not None:
            self.started += 1
            command = [sys.executable, "-m", "django", "outbox_consume", "--group", "poisoned", "--threads", "8"]
            self._process = subprocess.Popen(command, env=self.environment, stderr=subprocess.DEVNULL)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    found = Supervisor()
    yield found
    found.stop()


@pytest.fixture
def embedded() -> Iterator[EmbeddedBroker]:
    broker = EmbeddedBroker("default", {"DATABASE": "default"}, [TopicSpec("orders", TopicType.NORMAL)])
    yield broker
    broker.close()


def order(invoice: str, do: str = "fine") -> Outgoing:
    body = json.dumps({"invoice": invoice, "do": do}).encode()
    return Outgoing(str(message_id()), "orders", body, headers={Header.CONTENT_TYPE: "application/json"})


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "reasons",
    [
        {"kill": "begun 5 times, never ended"},
        {"stuck": "begun 5 times, never ended"},
        {
            "cancel": "CancelledError",
            "exit": "SystemExit: 5",
            "loop": "TimeLimitExceeded",
            "unspeakable": "Unspeakable: (its __str__ raised ValueError)",
        },
    ],
    ids=", ".join,
)
def test_becomes_a_dead_letter_and_its_fellows_are_applied_meanwhile(embedded, supervisor, monkeypatch, reasons):
    monkeypatch.setitem(supervisor.environment, "GIVE_UP_SECONDS", "1" if "stuck" in reasons else "")
    fellows = [order(f"A{number:02}") for number in range(FELLOWS)]
    embedded.send([*(order("poison", do) for do in reasons), *fellows])

    def is_settled() -> bool:
        supervisor.see_to_it()
        return len(errors("poisoned")) == len(reasons) and len(applied()) == FELLOWS

    wait_until(is_settled, 280)

    for error, reason in zip(sorted(errors("poisoned")), reasons.values(), strict=True):
        assert error.startswith(reason)
    assert sorted(applied()) == [f"A{number:02}" for number in range(FELLOWS)]
    if "kill" in reasons:
        assert supervisor.started == 6, "five that were killed, and one that gave it up"


@pytest.mark.timeout(300)
def test_that_kills_is_given_up_alone_though_others_run_beside_it_each_time(embedded, supervisor, monkeypatch):
    """Poison and slow fellows come back together, into the threads of one process, a message for each."""
    monkeypatch.setitem(supervisor.environment, "BATCH_SIZE", "1")
    embedded.send([order("poison", "kill"), *(order(f"A{number}", "slow") for number in range(6))])

    def is_settled() -> bool:
        supervisor.see_to_it()
        return bool(errors("poisoned")) and len(applied()) == 6

    wait_until(is_settled, 280)

    assert len(errors("poisoned")) == 1
    assert sorted(applied()) == [f"A{number}" for number in range(6)]


def test_that_is_to_come_back_beyond_all_dates_takes_nothing_with_it(embedded, supervisor):
    embedded.send([order("poison", "never"), *(order(f"A{number:02}") for number in range(FELLOWS))])

    def are_fellows_applied() -> bool:
        supervisor.see_to_it()
        return len(applied()) == FELLOWS and FailedDelivery.objects.exists()

    wait_until(are_fellows_applied, 30)

    assert supervisor.started == 1
    assert FailedDelivery.objects.get().outcome == "retry"
