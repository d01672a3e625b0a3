"""The recorder on the memory broker: what it writes down, and how far it says that it has come."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from io import StringIO

import psycopg
import pytest
from django.core.management import CommandError, call_command
from msgspec.structs import replace

from outbox import conf, database
from outbox.brokers.base import Broker
from outbox.brokers.memory import MemoryBroker
from outbox.errors import BrokerUnavailable
from outbox.failpoints import VARIABLE, FailpointReached
from outbox.models import Process
from outbox.pipeline import recorder as recorder_module
from outbox.pipeline.extension import PipelineExtension
from outbox.pipeline.models import RecordedMessage, RecordedTopic
from outbox.pipeline.recorder import Recorder
from outbox.relay.maintenance import prune
from tests.commands import refused
from tests.factories import message_id
from tests.outbox.consuming.deliveries import SOURCE, numbered, outgoing
from tests.outbox.consuming.messages import Cancelled, Placed
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

AT_ONCE = timedelta()
CELERY = {"BACKEND": "outbox.celery.CeleryBroker", "OPTIONS": {"APP": "tests.outbox.celery.app.app"}}


@pytest.fixture
def broker() -> Broker:
    return conf.make_broker("default")


@pytest.fixture(autouse=True)
def _soon(monkeypatch, settings, memory_brokers, no_consumers) -> None:
    """What a killed recorder held comes back at once where the broker's time moves; so it is soon sure."""
    settings.OUTBOX = {**settings.OUTBOX, "CONSUMER": {"INVISIBLE": timedelta(seconds=0.2)}}
    monkeypatch.setattr(recorder_module, "REDELIVERED_WITHIN", timedelta())
    monkeypatch.setattr(recorder_module, "BACKLOG_SECONDS", 0.0)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    found = Recorder("default", group="recorder", using="default")
    yield found
    found.close()


def rows() -> list[tuple[object, ...]]:
    return list(RecordedMessage.objects.order_by("id").values_list("message_id", "pos", "delivery_count"))


def is_read(since: datetime, topic: str = "orders") -> bool:
    until = RecordedTopic.objects.get(topic=topic).read_until
    return until is not None and until > since


class TestRecorder:
    def test_writes_down_what_each_message_says_of_itself_whatever_its_tag(self, broker, recorder):
        first = outgoing(Placed("1"), headers=numbered(7, lane=2), key="1")
        broker.send([first, outgoing(Cancelled("2"))])

        recorder.run_once(AT_ONCE)

        one, other = RecordedMessage.objects.order_by("id")
        assert (one.topic, str(one.message_id), one.source, one.lane, one.number) == ("orders", first.message_id, SOURCE, 2, 7)
        assert (one.key, one.tag, one.delivery_count) == ("1", "placed", 1)
        assert (other.tag, other.source, other.lane) == ("cancelled", "", None)
        assert abs(datetime.now(UTC) - one.stored_at) < timedelta(minutes=1)
        assert broker.backlog("recorder").waiting["orders"] == 0

    def test_escapes_what_no_text_of_the_database_can_hold(self, broker, recorder, monkeypatch):
        broker.send([outgoing(Placed("1"))])
        receive = MemoryBroker.receive
        with monkeypatch.context() as other_producer:
            odd = {"key": "a\x00b\udcff", "tag": "\x00"}
            other_producer.setattr(MemoryBroker, "receive", lambda *a, **k: [replace(one, **odd) for one in receive(*a, **k)])
            recorder.run_once(AT_ONCE)

        assert list(RecordedMessage.objects.values_list("key", "tag")) == [("a\\x00b\\udcff", "\\x00")]

    def test_has_two_rows_of_a_message_that_is_stored_twice(self, broker, recorder):
        broker.duplicate("send")
        broker.send([outgoing(Placed("1"))])

        recorder.run_once(AT_ONCE)

        assert [(pos, delivery_count) for _, pos, delivery_count in rows()] == [(0, 1), (1, 1)]

    def test_that_died_before_it_acknowledged_says_that_it_was_handed_the_same_again(self, broker, recorder, clock, monkeypatch):
        broker.send([outgoing(Placed("1"))])
        monkeypatch.setenv(VARIABLE, "recorder.after_write=raise")
        with pytest.raises(FailpointReached):
            recorder.run_once(AT_ONCE)
        recorder.close()
        monkeypatch.delenv(VARIABLE)
        clock.forward(timedelta(minutes=1))

        wait_until(lambda: recorder.run_once(AT_ONCE))  # the server may still hold the lock of the connection that was closed

        assert [(pos, delivery_count) for _, pos, delivery_count in rows()] == [(0, 1), (0, 2)]

    def test_knows_a_copy_in_order_by_its_place_though_one_that_was_killed_took_its_first_delivery(
        self, broker, recorder, clock, monkeypatch
    ):
        monkeypatch.setattr(recorder_module, "BATCH_SIZE", 1)
        broker.duplicate("send")
        broker.send([outgoing(Placed("1"), topic="ordered", key="1")])
        recorder.run_once(AT_ONCE)
        held = broker.receive("recorder", {"ordered": None}, limit=1, invisible_for=timedelta(seconds=30), wait=AT_ONCE)
        assert [(one.pos, one.delivery_count) for one in held] == [(1, 1)]
        clock.forward(timedelta(minutes=1))

        recorder.run_once(AT_ONCE)

        assert [(pos, delivery_count) for _, pos, delivery_count in rows()] == [(0, 1), (1, 1)]

    def test_writes_a_place_down_once_though_the_group_was_set_back(self, broker, recorder):
        broker.send([outgoing(Placed("1")), outgoing(Placed("2"))])
        recorder.run_once(AT_ONCE)
        before = rows()
        again = Recorder("default", group="from-the-beginning", using="default")

        again.run_once(AT_ONCE)
        again.close()

        assert rows() == before
        assert (again.received, again.written) == (2, 0)

    def test_lets_a_second_one_stand_by_until_it_is_gone(self, recorder):
        second = Recorder("default", group="recorder", using="default")

        assert recorder.run_once(AT_ONCE)
        assert not second.run_once(AT_ONCE)

        recorder.close()
        wait_until(lambda: second.run_once(AT_ONCE))  # the server frees the lock once it has seen the end of the connection
        second.close()

    def test_is_seen_among_the_processes_until_it_leaves(self, recorder):
        recorder.run_once(AT_ONCE)
        assert Process.objects.filter(kind="recorder", broker="default", consumer_group="recorder").exists()

        recorder.close()

        assert not Process.objects.filter(kind="recorder").exists()


class TestARecorderThatStandsStill:
    def test_makes_way_for_another_and_stands_by_when_it_goes_on(self, broker, recorder, monkeypatch, settings):
        settings.OUTBOX = {**settings.OUTBOX, "CONSUMER": {**settings.OUTBOX["CONSUMER"], "WAIT": AT_ONCE}}
        monkeypatch.setattr(recorder_module, "FROZEN_SECONDS", 0.3)
        second = Recorder("default", group="recorder", using="default")
        assert recorder.run_once(AT_ONCE)
        monkeypatch.setattr(recorder_module, "FROZEN_SECONDS", 60.0)

        wait_until(lambda: second.run_once(AT_ONCE))

        with pytest.raises(psycopg.OperationalError):
            recorder.run_once(AT_ONCE)
        assert not recorder.run_once(AT_ONCE)
        second.close()


class TestHowFarItHasCome:
    def test_is_said_once_all_is_read(self, broker, recorder):
        began = datetime.now(UTC)
        broker.send([outgoing(Placed("1"))])

        wait_until(lambda: recorder.run_once(AT_ONCE) and is_read(began), 30)

        assert len(rows()) == 1
        assert is_read(began, "plain")

    def test_is_not_said_while_something_may_be_held_by_one_that_was_killed(self, broker, recorder, monkeypatch):
        monkeypatch.setattr(recorder_module, "REDELIVERED_WITHIN", timedelta(hours=1))
        broker.send([outgoing(Placed("1"))])

        for _ in range(3):
            recorder.run_once(AT_ONCE)
            time.sleep(0.2)

        assert RecordedTopic.objects.get(topic="orders").read_until is None

    def test_is_not_said_while_messages_wait(self, broker, recorder, monkeypatch):
        monkeypatch.setattr(recorder_module, "BATCH_SIZE", 1)
        recorder.run_once(AT_ONCE)
        time.sleep(0.3)  # from now on it would be sure
        broker.send([outgoing(Placed(str(n))) for n in range(6)])
        sent = datetime.now(UTC)

        for _ in range(4):
            recorder.run_once(AT_ONCE)
            time.sleep(0.1)

        assert not is_read(sent)

    def test_is_said_of_a_busy_topic_by_what_the_broker_still_has(self, broker, recorder):
        began = datetime.now(UTC)

        def is_read_while_more_comes() -> bool:
            broker.send([outgoing(Placed("1"))])
            recorder.run_once(AT_ONCE)
            return is_read(began)

        wait_until(is_read_while_more_comes, 30)

        assert recorder.written > 2  # no call came back empty

    def test_begins_anew_with_another_group(self, recorder):
        began = datetime.now(UTC)
        wait_until(lambda: recorder.run_once(AT_ONCE) and is_read(began), 30)
        recorder.close()
        other = Recorder("default", group="other", using="default")

        other.run_once(AT_ONCE)

        topic = RecordedTopic.objects.get(topic="orders")
        assert (topic.consumer_group, topic.read_until) == ("other", None)
        assert topic.began_at > began
        other.close()

    def test_of_another_projects_group_says_so_and_does_not_claim_to_have_read(self, recorder, monkeypatch):
        owners: list[tuple[str, ...]] = []
        monkeypatch.setattr(MemoryBroker, "set_owner", lambda broker, *owner: owners.append(owner))
        foreign = dict.fromkeys(recorder.topics, "It belongs to the project 'blog'.")
        monkeypatch.setattr(MemoryBroker, "refusals", property(lambda broker: foreign if owners else {}))

        with pytest.raises(BrokerUnavailable, match="belongs to the project 'blog'"):
            recorder.run_once(AT_ONCE)

        [(source,)] = database.raw("default").execute("SELECT id FROM outbox_source").fetchall()
        assert owners == [("recorder", source, "project")]
        assert RecordedTopic.objects.get(topic="orders").read_until is None

    def test_is_said_of_other_topics_while_the_broker_refuses_one(self, broker, recorder, monkeypatch):
        began = datetime.now(UTC)
        monkeypatch.setattr(MemoryBroker, "refusals", {"orders": "Its queue has other arguments."})
        broker.send([outgoing(Placed("1"))])  # such a queue is read all the same

        wait_until(lambda: recorder.run_once(AT_ONCE) and is_read(began, "plain"), 30)

        assert len(rows()) == 1
        assert RecordedTopic.objects.get(topic="orders").read_until is None


class TestTheCommand:
    def test_ends_when_all_is_recorded_that_was_there(self, broker):
        broker.send([outgoing(Placed(str(n))) for n in range(5)])
        output = StringIO()

        call_command("outbox_record", "--until-read", "--broker", "default", "--json", stdout=output)

        assert output.getvalue() == '{"default": {"received": 5, "written": 5}}\n'
        assert RecordedTopic.objects.get(topic="ordered").consumer_group == "outbox-recorder"

    def test_records_chosen_topics(self, broker):
        broker.send([outgoing(Placed("1"))])

        call_command("outbox_record", "--until-read", "--topic", "elsewhere", stdout=StringIO())

        assert set(RecordedTopic.objects.values_list("topic", flat=True)) == {"elsewhere"}
        assert rows() == []

    def test_ends_with_the_reason_when_all_is_recorded_but_a_topic_that_the_broker_refuses(self, broker, monkeypatch):
        monkeypatch.setattr(MemoryBroker, "refusals", {"orders": "Its queue has other arguments."})

        with refused("Its queue has other arguments"):
            call_command("outbox_record", "--until-read", "--broker", "default")

        assert RecordedTopic.objects.get(topic="plain").read_until is not None

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--topic", "odrers"], "None of these brokers has topic odrers: default, second"),
            (["--broker", "nobody"], "Broker 'nobody' is not in OUTBOX"),
            (["--database", "nowhere"], "nowhere"),
        ],
    )
    def test_cannot_begin_with_what_is_not_there(self, arguments, said):
        with refused(said):
            call_command("outbox_record", *arguments)

    def test_is_not_needed_for_the_embedded_broker(self, settings):
        settings.OUTBOX = {"TOPICS": {"orders": {}}}

        with pytest.raises(CommandError, match="There is nothing to record"):
            call_command("outbox_record")
        with pytest.raises(CommandError, match="Broker 'default' needs no recorder: the audit reads its tables"):
            call_command("outbox_record", "--broker", "default")


class TestItsGroups:
    def test_are_among_those_that_topics_are_created_for(self, settings):
        settings.OUTBOX = {**settings.OUTBOX, "BROKERS": {**settings.OUTBOX["BROKERS"], "celery": CELERY, "embedded": {}}}

        found = {alias: list(PipelineExtension().consumer_groups(alias)) for alias in ("default", "celery", "embedded")}

        assert found == {"default": ["outbox-recorder", "outbox-recorder-other"], "celery": [], "embedded": []}


class TestWhatItWrote:
    def test_is_pruned_when_it_is_past_its_time(self):
        for age in (timedelta(days=9), timedelta()):
            RecordedMessage.objects.create(topic="orders", message_id=message_id(), recorded_at=datetime.now(UTC) - age)

        pruned = prune("default")

        assert (pruned.rows["outbox_recorded"], RecordedMessage.objects.count()) == (1, 1)


class TestABrokerOutOfReach:
    def test_has_it_begin_anew(self, broker, recorder, monkeypatch):
        recorder.run_once(AT_ONCE)
        began = datetime.now(UTC)
        monkeypatch.setattr(type(broker), "receive", _unavailable)
        with pytest.raises(BrokerUnavailable):
            recorder.run_once(AT_ONCE)
        monkeypatch.undo()
        monkeypatch.setattr(recorder_module, "REDELIVERED_WITHIN", timedelta(hours=1))

        recorder.run_once(AT_ONCE)

        assert not is_read(began)
        with database.connect("default") as connection:
            assert connection.execute(recorder_module.TRY_LOCK, ["default recorder"]).fetchone() == (False,)


def _unavailable(*_: object, **__: object) -> None:
    raise BrokerUnavailable("away")
