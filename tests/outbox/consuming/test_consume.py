"""`manage.py outbox_consume` as a real process on the embedded broker: killed, stopped, run until idle."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from outbox import consumer
from outbox.brokers.base import HalfRef
from outbox.check_backs import COMMIT
from outbox.consuming import worker
from outbox.embedded import EmbeddedBroker
from outbox.failpoints import VARIABLE
from outbox.message import TopicSpec, TopicType
from outbox.models import Duplicate, Inbox, Process
from project.shop.messages import OrderPlaced
from project.shop.models import CartEntry
from tests.commands import refused
from tests.database_url import environment_of
from tests.outbox.consuming.deliveries import outgoing
from tests.outbox.consuming.messages import Placed
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start `outbox_consume` on the test's database; what one with failpoints holds is handed out again soon."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, failpoints: str = "") -> subprocess.Popen[str]:
        settings = "tests.outbox.consuming.settings" if failpoints else "tests.process_settings"
        environment = environment_of(settings, **{VARIABLE: failpoints})
        command = [sys.executable, "-m", "django", "outbox_consume", "--group", "cart", *arguments]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def embedded() -> Iterator[EmbeddedBroker]:
    broker = EmbeddedBroker("default", {"DATABASE": "default"}, [TopicSpec("orders", TopicType.TRANSACTION)])
    yield broker
    broker.close()


def show(broker: EmbeddedBroker, *invoices: str) -> None:
    """Make orders visible to consumers, by half and commit."""
    messages = [outgoing(OrderPlaced(invoice, None, 1, Decimal(1))) for invoice in invoices]
    halves = [
        HalfRef(message.topic, outcome.half_id, message.message_id)
        for message, outcome in zip(messages, broker.send_halves(messages), strict=True)
    ]
    broker.end(halves, COMMIT)


def stop(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return output


class TestKilled:
    def test_between_commit_and_ack_the_message_comes_again_and_is_dropped(self, start, embedded):
        show(embedded, "A1")
        assert start(failpoints="consumer.after_commit=kill").wait(60) == -signal.SIGKILL
        assert CartEntry.objects.count() == 1

        successor = start("--json")
        wait_until(Duplicate.objects.exists)

        assert json.loads(stop(successor))["cart"]["duplicates"] == 1
        assert CartEntry.objects.count() == Inbox.objects.count() == 1
        assert embedded.backlog("cart").waiting == {"orders": 0}

    def test_inside_the_transaction_the_message_comes_again_and_is_applied(self, start, embedded):
        show(embedded, "A1")
        assert start(failpoints="consumer.after_handler=kill").wait(60) == -signal.SIGKILL
        assert not CartEntry.objects.exists()
        assert not Inbox.objects.exists()

        successor = start("--json")
        wait_until(Inbox.objects.exists)

        assert json.loads(stop(successor))["cart"] | {"late": 0} == {
            "handled": 1, "duplicates": 0, "ignored": 0, "deferred": 1, "dead_letters": 0, "released": 0, "late": 0,
        }  # fmt: skip
        assert CartEntry.objects.count() == 1


class TestConsume:
    def test_says_that_it_lives_and_leaves_cleanly_when_told_to_stop(self, start):
        process = start("--threads", "2")
        wait_until(lambda: Process.objects.filter(kind="consumer", consumer_group="cart", pid=process.pid).exists())

        output = stop(process)

        assert output == "Consuming group 'cart', topics orders.\ncart: no messages\n"
        assert not Process.objects.exists()

    def test_ends_when_nothing_waits(self, start, embedded):
        show(embedded, "A1", "A2", "A3")

        output, _ = start("--until-idle", "--json").communicate(timeout=60)

        assert json.loads(output)["cart"]["handled"] == 3
        assert CartEntry.objects.count() == 3

    def test_takes_one_batch_with_once(self, broker):
        @consumer(Placed, group="cart")
        def send_another(message, context):
            broker.send([outgoing(Placed("another"))])

        broker.send([outgoing(Placed("A1"))])
        output = StringIO()

        call_command("outbox_consume", "--once", "--json", stdout=output)

        assert json.loads(output.getvalue())["cart"]["handled"] == 1
        assert broker.backlog("cart").waiting == {"orders": 1}

    @pytest.mark.parametrize("quiet", ["--json", "--verbosity=0"])
    def test_can_be_told_to_say_nothing_at_first(self, broker, quiet):
        consumer(Placed, group="cart")(lambda message, context: None)
        output = StringIO()

        call_command("outbox_consume", "--once", quiet, stdout=output)

        assert "Consuming" not in output.getvalue()

    @pytest.mark.parametrize("end", ["--until-idle", "--once"])
    def test_ends_with_2_when_its_database_stays_away(self, monkeypatch, end):
        consumer(Placed, group="cart")(lambda message, context: None)
        monkeypatch.setattr(worker, "PATIENCE_SECONDS", 0.3)
        connection.close()

        with monkeypatch.context() as patch:
            patch.setitem(connection.settings_dict, "PORT", 1)
            with refused(r"refused|No such file"):
                call_command("outbox_consume", end)

    def test_names_the_known_groups_when_one_is_unknown(self):
        consumer(Placed, group="cart")(lambda message, context: None)

        with pytest.raises(CommandError, match="Choices are: cart"):
            call_command("outbox_consume", "--group", "card")

    def test_says_where_consumers_belong_when_there_are_none(self):
        with pytest.raises(CommandError, match=r"consumers\.py"):
            call_command("outbox_consume")

    @pytest.mark.parametrize("threads", ["0", "-1", "many"])
    def test_wants_a_thread_at_least(self, threads):
        with pytest.raises(CommandError, match=f"--threads: '{threads}' is not a number of 1 or more"):
            call_command("outbox_consume", f"--threads={threads}")
