"""What shares the backends of a pool in transaction mode: publishers, half first, consumers, the check-back endpoint."""

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from io import StringIO
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from django.core.management import call_command
from django.db import connections
from django.test import Client
from django.urls import reverse
from standardwebhooks import Webhook

from outbox import atomic, conf, database, publish, publish_raw
from outbox.consuming import register
from outbox.consuming.gaps import find_gaps
from outbox.consuming.worker import ConsumerThreads
from outbox.database import heartbeats
from outbox.models import InboxRow, MessageRow, MessageState, State
from outbox.monitoring.health import Health, health, readiness
from outbox.relay import hosts
from outbox.relay.maintenance import maintain
from project.servers.pgbouncer import PgBouncer
from project.servers.program import HOST
from project.shop.messages import OrderPlaced
from project.shop.models import CartEntry
from tests.check_back_secrets import SECRET
from tests.factories import BatchFactory, MessageRowFactory
from tests.outbox.api.questions import question_of
from tests.outbox.check_backs.halves import half_of
from tests.waiting import wait_until

pytestmark = [pytest.mark.pgbouncer, pytest.mark.usefixtures("pooled")]

SHOW = "SELECT current_setting('jit'), current_setting('statement_timeout')"
TARGET = hosts.RelayTarget("default", "default")


def placed(number: int) -> OrderPlaced:
    return OrderPlaced(invoice=str(number), customer=None, items=number, total=Decimal(1))


def in_threads(threads: int, work: Callable[[int], Any], numbers: Iterable[int]) -> list[Any]:
    """Do the work for each number in threads that close their connections after each, as a web server does."""

    def one(number: int) -> Any:
        try:
            return work(number)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(one, numbers))


def relay() -> None:
    hosts.run_once(TARGET, note="test", at_most=timedelta(seconds=30), idle_timeout=hosts.NO_IDLE_TIMEOUT)


def publish_one(number: int) -> None:
    with atomic():
        CartEntry.objects.create(invoice=str(number), change=1)
        publish(placed(number))
        publish_raw("ordered", {"number": number}, key=str(number % 5))


def go_half_first(number: int) -> None:
    with atomic(half_first=placed(number)):
        CartEntry.objects.create(invoice=str(number), change=1)


class TestAConnectionOfOurOwn:
    def test_has_its_settings_in_each_statement_and_transaction(self, left_behind):
        with database.connect("default", settings={"statement_timeout": "3s"}) as connection:
            alone = [connection.execute(SHOW).fetchone() for _ in range(10)]
            with connection.transaction(), connection.transaction():
                together = connection.execute(SHOW).fetchone()

        assert {*alone, together} == {("off", "3s")}
        assert left_behind() == []

    def test_goes_on_after_an_error(self):
        with database.connect("default") as connection:
            with pytest.raises(psycopg.errors.DivisionByZero):
                connection.execute("SELECT 1 / 0")

            assert connection.execute(SHOW).fetchone() == ("off", "0")

    def test_keeps_its_session_where_the_pooler_leaves_it(self, pooler, direct_url, monkeypatch):
        with PgBouncer(direct_url, mode="session") as other:
            monkeypatch.setitem(connections["direct"].settings_dict, "HOST", HOST)
            monkeypatch.setitem(connections["direct"].settings_dict, "PORT", other.port)

            with database.connect_session("default") as connection:
                assert connection.execute(SHOW).fetchone() == ("off", "0")
                assert connection.prepare_threshold == 5


class TestPublishing:
    def test_works_in_more_threads_than_there_are_backends(self, left_behind):
        in_threads(8, publish_one, range(100))

        assert (CartEntry.objects.count(), MessageRow.objects.count()) == (100, 200)
        assert left_behind() == []


class TestHalfFirst:
    def test_commits_each_message_with_its_transaction(self, left_behind):
        # One backend is left over for the half messages: each transaction holds one, and wants another meanwhile.
        in_threads(3, go_half_first, range(30))

        assert CartEntry.objects.count() == 30
        assert MessageState.objects.filter(topic="orders", state="sent").count() == 30
        broker = conf.make_broker("default")
        shown = broker.receive("cart", {"orders": None}, limit=100, invisible_for=timedelta(1), wait=timedelta(0))
        broker.close()
        assert {one.message_id for one in shown} == {str(row.id) for row in MessageRow.objects.all()}
        assert left_behind() == []


class TestConsumers:
    def test_handle_each_message_once(self, left_behind):
        in_threads(4, lambda number: publish_orders(range(number, number + 50)), range(0, 200, 50))
        relay()
        threads = ConsumerThreads([register.group("cart")], threads=4)

        threads.start(until_idle=True)
        threads.join()

        assert sorted(int(entry.invoice) for entry in CartEntry.objects.all()) == list(range(200))
        assert InboxRow.objects.filter(consumer_group="cart").count() == 200
        assert threads.counts()["cart"].handled == 200
        assert left_behind() == []

    def test_find_what_comes_while_they_wait(self, left_behind):
        threads = ConsumerThreads([register.group("cart")])
        threads.start()
        try:
            for number in range(3):
                publish_orders([number])
                relay()
                wait_until(lambda count=number + 1: CartEntry.objects.count() == count, seconds=10)
        finally:
            threads.stop()
            threads.join()

        assert left_behind() == []


def publish_orders(numbers: Iterable[int]) -> None:
    with atomic():
        for number in numbers:
            publish(placed(number))


class TestTheCheckBackEndpoint:
    def test_answers(self, settings, left_behind):
        settings.OUTBOX = {**settings.OUTBOX, "CHECK_BACK": {"SECRETS": [SECRET]}}
        rows = [MessageRowFactory() for _ in range(20)]
        halves = [half_of(BatchFactory(state=State.SENT, message_ids=[row.id], half_ids=["h"])) for row in rows]

        answers = in_threads(8, lambda nth: ask(question_of(halves[nth])), range(20))

        assert answers == [(200, "COMMIT")] * 20
        assert left_behind() == []


class TestThoseWhoLook:
    def test_leave_nothing_behind(self, left_behind):
        publish_orders(range(10))

        for _ in range(5):
            maintain("default")
            find_gaps(register.group("cart"))
            heartbeats.beat(database.raw("default"), "relay", broker="default")
            call_command("outbox_status", database=["default"], stdout=StringIO())
            assert (readiness()["default"], health()["default"]) == (Health.OK, Health.OK)

        assert left_behind() == []


def ask(question: dict[str, Any]) -> tuple[int, str]:
    """Ask as a broker's checker does, over HTTP."""
    body, request_id, now = json.dumps(question), str(uuid4()), datetime.now(UTC)
    signed = {
        "webhook-id": request_id,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": Webhook(SECRET).sign(request_id, now, body),
    }
    response = Client().post(reverse("outbox:check-back"), body, content_type="application/json", headers=signed)
    return response.status_code, response.json()["answer"]
