"""Every process that sends half messages answers for them: long-running relay, Celery child, checker; each a real process."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.db import connections

from outbox import database
from outbox.brokers.base import Broker
from outbox.models import Batch, CheckBack, Topic
from outbox.relay.rounds import Relay
from project.servers.rocketmq import FAST_CHECKS, RocketMQ
from tests.check_back_secrets import SECRET
from tests.factories import TicketFactory
from tests.outbox.brokers.rocketmq.log import producers, seen
from tests.waiting import wait_until

# A process of its own, on the test's database.
SET_UP = """
import json, os, sys
import django
sys.path.insert(0, os.getcwd())
from django.conf import settings
name, settings.OUTBOX = json.loads(sys.argv[1])
settings.DATABASES["default"]["NAME"] = name
django.setup()
from django.core.management import call_command
"""

HOSTS = {
    "outbox_checker": 'call_command("outbox_checker")',
    "outbox_checker over HTTP": 'call_command("outbox_checker", "--over-http")',
    "outbox_relay": 'call_command("outbox_relay")',
    # As a prefork worker: the parent has imported all, the child runs its first relay task and lives on.
    "Celery child": """
import signal
from outbox import tasks
if os.fork() == 0:
    tasks.relay("default", "default")
    signal.pause()
signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
os.wait()
""",
}

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def start(live_server: Any, topic: Topic, settings: Any) -> Iterator[Start]:
    """Start a host; all of them end with the test."""
    check_back = {"URL": f"{live_server.url}/outbox/check-back/", "SECRETS": [SECRET]}
    settings.OUTBOX = {**settings.OUTBOX, "CHECK_BACK": check_back}
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str) -> subprocess.Popen[bytes]:
        given = json.dumps([connections["default"].settings_dict["NAME"], django_settings.OUTBOX])
        program = [sys.executable, "-c", SET_UP + HOSTS[name], given]
        started.append(subprocess.Popen(program, cwd=django_settings.BASE_DIR, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        process.terminate()
    for process in started:
        process.wait(60)


@pytest.fixture
def fast_checks(server: RocketMQ) -> Iterator[None]:
    server.set("transactionTimeOut", 500)
    yield
    server.set("transactionTimeOut", FAST_CHECKS["transactionTimeOut"])


def listeners(topic: str) -> set[int]:
    """Return the processes that the broker may ask about a topic."""
    return {int(client.split("@")[1]) for client in producers(topic)}


class TestHosts:
    def test_all_listen_and_share_the_questions(
        self,
        start: Start,
        topic: Topic,
        broker: Broker,
        connection: database.Connection,
        die: Callable[[Relay, str], None],
        fast_checks: None,
    ):
        tickets = TicketFactory.create_batch(20, topic=topic)
        message_ids = {str(ticket.message_id) for ticket in tickets}
        die(Relay(connection, broker, 1), "relay.after_decide")

        pids = {name: start(name).pid for name in HOSTS}

        heard = wait_until(lambda: len(found := listeners(topic.name)) == len(HOSTS) and found, 120)
        assert {pid for name, pid in pids.items() if name != "Celery child"} < heard
        assert pids["Celery child"] not in heard  # its child is
        wait_until(lambda: seen(topic.name, message_ids) == message_ids, 120)
        assert set(CheckBack.objects.values_list("answer", flat=True)) <= {"COMMIT", "UNKNOWN"}

    def test_answer_over_http_alone(
        self,
        start: Start,
        topic: Topic,
        broker: Broker,
        connection: database.Connection,
        die: Callable[[Relay, str], None],
        fast_checks: None,
    ):
        ticket = TicketFactory(topic=topic)
        die(Relay(connection, broker, 1), "relay.after_decide")

        start("outbox_checker over HTTP")

        wait_until(lambda: seen(topic.name, {str(ticket.message_id)}), 120)
        assert set(CheckBack.objects.values_list("asked_by", flat=True)) == {"endpoint"}
        assert Batch.objects.get().open is None
