"""Tables that are emptied, filled or restored while the processes run that know what was in them."""

from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any

import psycopg
import pytest
from django.core.management import call_command
from django.db import IntegrityError, connections

from outbox import atomic, consumer, database, publish_raw
from outbox.consuming import register
from outbox.consuming.worker import Worker
from outbox.embedded import topics as embedded_topics
from outbox.embedded.models import EmbeddedMessage
from outbox.errors import NotMigrated
from outbox.ids import topic_number
from outbox.models import MessageState, Ticket, Topic
from outbox.monitoring.attention import read_attention
from outbox.monitoring.status import read_status
from outbox.monitoring.timeline import read_timeline
from outbox.monitoring.why import why
from outbox.relay import hosts
from outbox.relay.hosts import NO_IDLE_TIMEOUT, RelayTarget
from outbox.relay.loops import RelayThread
from outbox.topics import forget, topic_id
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

EMBEDDED = {"BACKEND": "outbox.embedded.EmbeddedBroker"}

TABLES = (
    "outbox_topic, outbox_message, outbox_ticket, outbox_delayed, outbox_batch, outbox_lane, outbox_idempotency_key,"
    " outbox_inbox, outbox_process, outbox_embedded_topic, outbox_embedded_queue, outbox_embedded_message, outbox_embedded_half,"
    " outbox_embedded_offset, outbox_embedded_delivery"
)


@pytest.fixture(autouse=True)
def _outbox(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.OUTBOX = {
        "BROKERS": {"default": EMBEDDED},
        "TOPICS": {"apples": {"TYPE": "normal"}, "pears": {"TYPE": "fifo"}, "plums": {"TYPE": "normal"}},
        "CELERY_WAKEUP": False,
    }
    monkeypatch.setattr(register, "registered", {})
    monkeypatch.setattr(hosts, "MATCH_TOPICS_SECONDS", 0.0)
    monkeypatch.setattr(embedded_topics, "READ_SECONDS", 0.0)


@pytest.fixture
def handled() -> list[tuple[str, str]]:
    """What handlers got: the topic, and the one that the publisher had named."""
    found: list[tuple[str, str]] = []
    for name in ("apples", "pears", "plums"):
        consumer(topic=name, group="kitchen")(lambda body, context: found.append((context.topic, body["topic"])))
    return found


def publish(*topics: str, **options: Any) -> None:
    with atomic():
        for name in topics:
            publish_raw(name, {"topic": name}, key="k", **options)


def relay() -> int:
    target = RelayTarget("default", "default")
    return hosts.run_once(target, note="test", at_most=timedelta(seconds=10), idle_timeout=NO_IDLE_TIMEOUT).sent


def consume() -> None:
    with closing(Worker(register.group("kitchen"), "default")) as worker:
        worker.run(until_idle=True)


@pytest.fixture
def relay_thread() -> Iterator[None]:
    thread = RelayThread(RelayTarget("default", "default"))
    thread.start()
    yield
    thread.stop()
    thread.join(20)


def empty(connection: database.Connection) -> None:
    """Empty the tables; again, as an operator would, if PostgreSQL has chosen this of two statements in a deadlock."""

    def is_done() -> bool:
        with suppress(psycopg.errors.DeadlockDetected):
            connection.execute(f"TRUNCATE {TABLES} RESTART IDENTITY")
            return True
        return False

    wait_until(is_done)


@pytest.fixture
def operator() -> Iterator[database.Connection]:
    with database.connect("default") as connection:
        yield connection


class TestAProcessThatHasPublished:
    def test_publishes_on_after_the_tables_were_emptied(self, operator, handled):
        publish("apples", "pears")
        empty(operator)

        publish("apples", "pears")
        relay()
        consume()

        assert sorted(handled) == [("apples", "apples"), ("pears", "pears")]

    def test_publishes_to_its_topics_after_others_have_written_them_in_another_order(self, operator, handled):
        publish("apples", "plums")
        empty(operator)
        for name in ("plums", "apples"):
            operator.execute("INSERT INTO outbox_topic (id, name, type) VALUES (%s, %s, 'normal')", [topic_number(name), name])

        publish("apples", "plums", idempotency_key="once")
        relay()
        consume()

        assert sorted(handled) == [("apples", "apples"), ("plums", "plums")]

    def test_has_the_id_that_the_database_makes_of_the_name(self, operator):
        for name in ("apples", "Äpfel", "りんご", "a" * 200):
            operator.execute("INSERT INTO outbox_topic (id, name, type) VALUES (%s, %s, 'normal')", [topic_number(name), name])

        assert topic_id("apples", "default") == topic_number("apples")

    def test_is_not_lied_to_by_a_row_with_another_id(self, operator):
        with pytest.raises(psycopg.errors.CheckViolation, match="outbox_topic_id_is_of_name"):
            operator.execute("INSERT INTO outbox_topic (id, name, type) VALUES (1, 'cherries', 'normal')")
        with pytest.raises(IntegrityError):
            Topic.objects.create(id=topic_number("plums"), name="cherries", type="normal")


class TestMessagesOfATopicWithoutARow:
    def test_are_counted_and_named(self, operator, settings):
        publish("apples", "pears")
        publish("plums", delay=timedelta(hours=1))
        message = MessageState.objects.get(topic="apples").id
        settings.OUTBOX = {**settings.OUTBOX, "TOPICS": {"pears": {"TYPE": "fifo"}}}
        operator.execute("TRUNCATE outbox_topic")

        status = read_status(database.raw("default"), "default")
        found = [one for one in read_attention(database.raw("default"), "default") if one.id == "outbox.unknown_topic"]

        names = {"apples": f"#{topic_number('apples')}", "plums": f"#{topic_number('plums')}"}
        assert {one.name: (one.waiting, one.delayed) for one in status.topics} == {
            names["apples"]: (1, 0),
            "pears": (1, 0),
            names["plums"]: (0, 1),
        }
        assert sorted(one.obj for one in found) == sorted(f"topic {name!r}" for name in names.values())
        assert read_timeline("default", message).topic == names["apples"]
        assert "no relay sends them" in (why(database.raw("default"), message, using="default") or "")

    def test_are_sent_when_settings_have_it_again(self, operator, settings, handled):
        publish("apples")
        complete = settings.OUTBOX
        settings.OUTBOX = {**complete, "TOPICS": {"pears": {"TYPE": "fifo"}}}
        operator.execute("TRUNCATE outbox_topic")
        relay()
        assert Ticket.objects.count() == 1

        settings.OUTBOX = complete
        relay()
        consume()

        assert handled == [("apples", "apples")]


class TestARunningRelayAndConsumer:
    @pytest.fixture(autouse=True)
    def _running(self, relay_thread, handled) -> Iterator[None]:
        worker = Worker(register.group("kitchen"), "default")

        def work() -> None:
            worker.run()
            connections.close_all()

        thread = Thread(target=work, daemon=True)
        thread.start()
        yield
        worker.stop()
        thread.join(20)
        worker.close()

    @pytest.mark.parametrize(
        "empty_all",
        [lambda operator: call_command("flush", interactive=False, verbosity=0), empty],
        ids=["a flush", "a restore that no process was told of"],
    )
    def test_go_on_after(self, operator, handled, empty_all):
        publish("apples", "pears")
        wait_until(lambda: len(handled) == 2)

        empty_all(operator)
        publish("apples", "pears", "plums")

        wait_until(lambda: len(handled) == 5)
        assert sorted(handled[2:]) == [("apples", "apples"), ("pears", "pears"), ("plums", "plums")]


class TestAnOutboxWithoutItsId:
    """Its row is in no model's table, so `flush` leaves it; a cleaner of all tables does not."""

    @pytest.fixture(autouse=True)
    def _emptied(self, operator) -> Iterator[None]:
        before = operator.execute("SELECT id, project FROM outbox_source").fetchone()
        publish("apples")
        forget("default")
        operator.execute("TRUNCATE outbox_source")
        yield
        operator.execute("TRUNCATE outbox_source")
        operator.execute("INSERT INTO outbox_source (id, project) VALUES (%s, %s)", before)

    @pytest.mark.parametrize("act", [relay, partial(publish, "apples")])
    def test_says_which_command_writes_it_anew(self, act):
        with pytest.raises(NotMigrated, match=r"outbox_source in database .* is empty") as caught:
            act()

        assert caught.value.hint.startswith("Run manage.py migrate,")

    def test_gets_a_new_one_by_migrate(self, handled):
        call_command("migrate", verbosity=0)

        publish("pears")
        relay()
        consume()

        assert sorted(handled) == [("apples", "apples"), ("pears", "pears")]

    @pytest.mark.usefixtures("relay_thread")
    def test_replaces_the_old_one_in_what_a_running_relay_sends(self, operator):
        call_command("migrate", verbosity=0)
        wait_until(EmbeddedMessage.objects.exists)
        operator.execute("UPDATE outbox_source SET id = 'urn:uuid:another'")

        def is_sent_anew() -> bool:
            publish("apples")
            return EmbeddedMessage.objects.filter(source="urn:uuid:another").exists()

        wait_until(is_sent_anew)
