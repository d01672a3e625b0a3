import re
import shlex
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import celery
import pytest
from django.core.management import call_command

from outbox import conf, consumer, database
from outbox.brokers.base import Backlog, Outgoing
from outbox.brokers.memory import MemoryBroker
from outbox.consuming import register
from outbox.database.partitions import create_partition
from outbox.embedded.models import EmbeddedHalf, EmbeddedTopic, HalfState
from outbox.errors import BrokerCannotTell, BrokerUnavailable
from outbox.ids import topic_number
from outbox.message import Message
from outbox.models import Deferred, FailedSend, Gap, Inbox, Process, State, Topic
from outbox.monitoring.attention import read_attention
from outbox.monitoring.connection import bounded
from outbox.relay.rounds import MISCONFIGURED_RETRY
from outbox.schedule import beat_schedule
from outbox.testing.factories import DeferredFactory, FailedDeliveryFactory
from tests.factories import BatchFactory, MessageRowFactory, TicketFactory, TopicFactory, message_id
from tests.outbox.monitoring.times import ago

pytestmark = pytest.mark.django_db


class Parcel(Message):
    number: int

    class Meta:
        topic = "parcels"
        type = "attention.parcel"


@pytest.fixture(autouse=True)
def _clean_slate(settings, monkeypatch, db):
    memory = {"BACKEND": "outbox.brokers.memory.MemoryBroker", "OPTIONS": {"NAME": uuid4().hex}}
    topics = {"parcels": {"TYPE": "normal"}}
    settings.OUTBOX = {"TOPICS": topics, "BROKERS": {"default": memory}, "CELERY_WAKEUP": False}
    monkeypatch.setattr(register, "registered", {})
    create_partition(database.raw("default"), ago(days=1).date())  # soon after midnight, what is an hour old is of that day


@pytest.fixture
def read(settings):
    def read():
        """Return the entries, with the topics of the test in settings."""
        made = {name: {} for name in Topic.objects.values_list("name", flat=True)}
        settings.OUTBOX = {**settings.OUTBOX, "TOPICS": {**made, **settings.OUTBOX["TOPICS"]}}
        connection = database.raw("default")
        with bounded("default", connection):
            return read_attention(connection, "default")

    return read


@pytest.fixture
def schedule(monkeypatch):
    """Give Celery's beat a schedule of ours."""

    def schedule(**options):
        app = celery.Celery("project", set_as_current=False)
        app.conf.beat_schedule = beat_schedule(**options)
        monkeypatch.setattr(celery, "current_app", app)

    return schedule


@pytest.fixture
def relay():
    return a_process("relay")


@pytest.fixture
def cart():
    consumer(Parcel, group="cart")(lambda message, context: None)


def a_process(kind, *, broker="default", silent=0, age=60, **fields):
    made = Process.objects.create(kind=kind, host="h", pid=Process.objects.count() + 1, broker=broker, **fields)
    Process.objects.filter(id=made.id).update(beat_at=ago(seconds=silent), started_at=ago(seconds=age))
    return made


def a_consumer(**fields):
    return a_process("consumer", consumer_group="cart", **fields)


def a_backlog(*names):
    """Send messages that the group has not read, after others that it has."""
    broker = conf.make_broker("default")
    broker.receive("cart", ["parcels"], limit=1, invisible_for=timedelta(seconds=1), wait=timedelta(0))
    broker.send([Outgoing(name, "parcels", b"{}") for name in names])


def nobody_answers(*arguments):
    raise BrokerUnavailable("nobody answers")


def deferred(seconds, group="cart", **fields):
    """A message of the group that was deferred so long ago, and is due since then."""
    fields = {"due_at": ago(seconds=seconds)} | fields
    if any(fields.get(state) for state in ("waiting", "held")):
        del fields["due_at"]
    return DeferredFactory(consumer_group=group, deferred_at=ago(seconds=seconds), **{"topic": "parcels", **fields})


def sent(seconds):
    topic = Topic.objects.filter(name="parcels").first() or TopicFactory(name="parcels")
    return BatchFactory(topic=topic, state=State.SENT, sent_at=ago(seconds=seconds))


def handled(seconds, number=1, topic="parcels"):
    about = {"consumer_group": "cart", "topic": topic, "handled_at": ago(seconds=seconds)}
    Inbox.objects.bulk_create(Inbox(idempotency_key=uuid4().hex, message_id=uuid4(), **about) for _ in range(number))


class TestTopics:
    @pytest.fixture(autouse=True)
    def _relay(self, relay):
        pass

    def test_need_none_when_all_is_well(self, read):
        TicketFactory()

        assert read() == []

    def test_name_messages_that_the_broker_rejected(self, read):
        BatchFactory(topic=TopicFactory(name="broken"), size=2, state=State.DEAD)

        [one] = read()

        assert one.line == (
            "Topic 'broken': (outbox.rejected) 2 messages are dead: rejected, without a row, or perhaps published. See the "
            "reasons with outbox_replay --unsent --topic broken; correct them, then add --all to send again, or --all --discard."
        )

    def test_name_commands_that_act_on_the_database_of_the_topic(self, settings):
        settings.OUTBOX = {**settings.OUTBOX, "TOPICS": {"broken": {}}}
        topic = TopicFactory(name="broken", paused=True, paused_at=ago(hours=25))
        BatchFactory(topic=topic, state=State.DEAD)

        rejected, paused = read_attention(database.raw("default"), "other")

        assert "outbox_replay --unsent --topic broken --database other;" in rejected.hint
        assert paused.hint == "End the pause with outbox_pause broken --database other --resume."

    def test_name_what_waits_too_long_and_where_to_ask_why(self, read):
        topic = TopicFactory(name="slow")
        old = MessageRowFactory(topic=topic, id=message_id(ago(minutes=3)))
        TicketFactory(topic=topic, message=old)

        [one] = read()

        assert (one.id, one.msg) == ("outbox.late", "The oldest message has waited for 3 min.")
        assert one.hint == f"See why with outbox_status --message {old.id}."

    def test_leave_paused_ones_alone(self, read):
        topic = TopicFactory(paused=True)
        TicketFactory(topic=topic, message=MessageRowFactory(topic=topic, id=message_id(ago(hours=1))))

        assert read() == []

    @pytest.mark.parametrize("hours", [23, 25])
    def test_name_one_that_was_paused_for_more_than_a_day(self, read, hours):
        since = {"paused_at": ago(hours=hours), "paused_by": "ann", "pause_reason": "a fix"}
        TicketFactory(topic=TopicFactory(name="held", paused=True, **since))

        found = read()

        assert [(one.id, one.msg) for one in found] == [
            ("outbox.paused", "It is paused by ann for 25 h: a fix. 1 message waits.")
        ] * (hours == 25)
        for one in found:
            assert one.hint == "End the pause with outbox_pause held --database default --resume."

    def test_name_one_that_the_settings_do_not_have(self, settings):
        TicketFactory(topic=TopicFactory(name="former"))

        [one] = read_attention(database.raw("default"), "default")

        assert (one.id, one.obj) == ("outbox.unknown_topic", "topic 'former'")

    def test_name_what_keeps_failing(self, read):
        BatchFactory(topic=TopicFactory(name="unsure"), state=State.RELEASED, failures=10)

        assert [(one.id, one.msg) for one in read()] == [("outbox.send_fails", "A message has failed 10 times.")]

    def test_name_what_the_broker_is_not_set_up_for(self, read):
        batch = BatchFactory(topic=TopicFactory(name="wrong"), state=State.RELEASED, attempt=2, last_error="Wrong type.")
        about = {"batch_id": batch.id, "message_ids": batch.message_ids, "verdict": "misconfigured"}
        FailedSend.objects.create(**about, attempt=2, reason="Wrong type.")
        mended = BatchFactory(topic=TopicFactory(name="mended"), state=State.SENT, attempt=2)
        FailedSend.objects.create(**about | {"batch_id": mended.id}, attempt=2)

        [one] = read()
        assert (one.id, one.msg, one.error) == (
            "outbox.misconfigured",
            "The topic is not configured correctly at the broker.",
            "Wrong type.",
        )
        assert "not configured correctly at the broker. Wrong type. Correct what" in one.line
        assert one.hint.endswith(f"within {MISCONFIGURED_RETRY.seconds} s.")

    def test_name_parked_half_messages(self, read, settings):
        settings.OUTBOX = {"TOPICS": {"parked": {"TYPE": "transaction"}}}
        topic = EmbeddedTopic.objects.create(id=topic_number("parked"), name="parked", type="transaction", queues=1)
        times = {"born_at": ago(minutes=1), "ask_at": ago(minutes=1)}
        EmbeddedHalf.objects.create(
            id=1, topic_id=topic.id, queue=0, message_id="m", headers="{}", body=b"", asked=15, state=HalfState.PARKED, **times
        )

        assert [one.msg for one in read()] == [
            "1 half message neither committed nor rolled back: the broker sends no more check-backs."
        ]

    def test_name_rows_in_the_default_partition(self, read):
        MessageRowFactory(id=message_id(datetime(2001, 1, 1, tzinfo=UTC)))

        assert [one.id for one in read()] == ["outbox.no_maintenance"]


class TestProcesses:
    def test_name_a_relay_that_never_was(self, read):
        assert [(one.id, one.msg) for one in read()] == [("outbox.no_relay", "No relay is running.")]

    def test_name_a_relay_that_was_killed(self, read):
        a_process("relay", silent=12)

        [one] = read()

        assert (one.id, one.obj) == ("outbox.no_relay", "broker 'default'")
        assert one.msg == "No relay is running: the last heartbeat came 12 s ago, from h:1."

    def test_name_one_of_two_relays_that_is_frozen(self, read, relay):
        a_process("relay", silent=12)

        [one] = read()

        assert (one.id, one.msg) == ("outbox.process_silent", "The relay h:2 has sent no heartbeat for 12 s.")

    def test_leave_one_alone_that_another_has_replaced(self, read):
        a_process("relay", silent=40)
        a_process("relay", age=30)

        assert read() == []

    def test_leave_a_child_of_celerys_alone_that_has_no_task(self, read):
        a_process("relay", silent=40, note="celery")
        a_process("relay", age=300, note="celery")
        a_process("sweep", age=300, note="celery")

        assert read() == []

    @pytest.mark.parametrize(("silent", "found"), [(60, []), (70, ["outbox.no_relay"])])
    def test_miss_a_relay_of_celerys_when_beat_has_called_twice(self, read, silent, found, schedule):
        schedule(sweep=timedelta(seconds=30))
        a_process("relay", silent=silent, note="celery")

        assert [one.id for one in read()] == found

    def test_name_a_checker_that_was_killed(self, read, relay):
        a_process("checker", silent=12)

        assert [one.id for one in read()] == ["outbox.no_checker"]

    def test_name_a_recorder_that_was_killed(self, read, relay):
        a_process("recorder", silent=12, consumer_group="audit")

        assert [(one.id, one.obj) for one in read()] == [("outbox.process_silent", "group 'audit'")]

    def test_name_what_a_broker_said_last(self, read):
        a_process("relay", breaker="half-open")
        BatchFactory(topic=TopicFactory(name="orders"), state=State.RELEASED, last_error="It takes nothing: memory alarm.")

        [one] = read()

        assert (one.id, one.error) == ("outbox.broker_away", "It takes nothing: memory alarm.")

    def test_name_a_broker_once_that_does_not_answer(self, read, cart, monkeypatch):
        monkeypatch.setattr(MemoryBroker, "backlog", nobody_answers)
        a_process("relay", breaker="open")
        a_process("relay", breaker="half-open")

        [one] = read()

        assert (one.id, one.msg, one.error) == ("outbox.broker_away", "It cannot be reached.", "nobody answers")


class TestADatabase:
    def test_that_accepts_no_writes_is_named_without_what_follows_from_it(self, read):
        a_process("relay", silent=60)
        database.raw("default").execute("SET transaction_read_only = on")

        assert [one.id for one in read()] == ["outbox.read_only"]


class TestWakeupsByCelery:
    @pytest.fixture(autouse=True)
    def _app(self, settings, schedule):
        settings.OUTBOX = {**settings.OUTBOX, "CELERY_WAKEUP": True}
        schedule()

    def test_that_no_worker_takes_are_named(self, read, relay):
        MessageRowFactory(id=message_id(ago(minutes=2)))

        [one] = read()

        assert one.id == "outbox.no_worker"
        assert one.line.startswith(
            "Queue 'outbox': (outbox.no_worker) Commits send wakeups to it, and no worker of Celery takes them."
        )

    def test_are_not_reported_while_a_worker_relays(self, read, relay):
        MessageRowFactory(id=message_id(ago(minutes=2)))
        a_process("relay", note="celery", silent=110)

        assert [one for one in read() if one.id == "outbox.no_worker"] == []

    @pytest.mark.parametrize("age", [1, 600])
    def test_are_not_judged_by_messages_that_are_too_new_or_too_old(self, age, read, relay):
        MessageRowFactory(id=message_id(ago(seconds=age)))

        assert read() == []

    def test_are_not_sent_by_a_tombstone_of_a_check_back(self, read, relay):
        MessageRowFactory(id=message_id(ago(minutes=2)), topic_id=0)

        assert read() == []

    def test_that_come_while_beat_is_away_are_no_sign_of_it(self, read):
        a_process("relay", note="celery", age=300)
        a_process("sweep", note="celery", age=300, silent=120)

        [one] = read()

        assert (one.id, one.obj) == ("outbox.no_beat", "broker 'default'")
        assert one.msg.startswith("Celery's beat has sent no sweep for 2 min: ")

    @pytest.mark.parametrize("kind", ["relay", "sweep"])
    def test_leave_beat_alone_where_a_sweep_came_or_a_long_running_relay_runs(self, kind, read):
        a_process("relay", note="celery", age=300)
        a_process(kind, note="celery" if kind == "sweep" else "long-running")

        assert read() == []

    def test_leave_beat_alone_in_the_first_seconds_of_a_worker(self, read):
        a_process("relay", note="celery", age=5)

        assert read() == []

    def test_are_not_looked_for_where_none_are_sent(self, read, relay, settings):
        settings.OUTBOX = {**settings.OUTBOX, "CELERY_WAKEUP": False}
        MessageRowFactory(id=message_id(ago(minutes=2)))

        assert read() == []


def at_work(seconds, limit=None):
    """A consumer whose handler has run for so long; what its heartbeat says of it."""
    handling = {"topic": "parcels", "message_id": "m-1", "handler": "shop.add_points", "limit_seconds": limit, "seconds": seconds}
    return a_consumer(handling=handling)


# Groups that need nobody.
WELL = {
    "somebody consumes": lambda: (a_consumer(), a_backlog("a")),
    "nothing waits": lambda: (a_consumer(silent=160), a_backlog()),
    "the first message for long has just come": lambda: (a_consumer(), a_backlog("a"), handled(seconds=3600), sent(seconds=2)),
    "it never handled, in its first minutes": lambda: (a_consumer(age=60), a_backlog("a", "b", "c")),
    "a burst after an idle night": lambda: (a_consumer(), a_backlog(*map(str, range(50))), handled(seconds=5, number=10)),
    "a failed message is about to be retried": lambda: (
        a_consumer(),
        handled(seconds=1),
        deferred(seconds=40, failures=1, waiting=True),
    ),
    "a handler wants its message later": lambda: (a_consumer(), handled(seconds=1), deferred(seconds=4000, waiting=True)),
    "a failed message whose inbox was emptied": lambda: (
        a_consumer(),
        FailedDeliveryFactory(consumer_group="cart", topic="parcels"),
    ),
    "a handler is at work": lambda: at_work(59.0),
    "a handler is within its time limit": lambda: at_work(299.0, limit=300.0),
    "messages wait for a handler within its time limit": lambda: (
        at_work(400.0, limit=600.0),
        a_backlog("a", "b", "c"),
        handled(seconds=400),
    ),
}


class TestGroups:
    @pytest.fixture(autouse=True)
    def _relay(self, relay, cart):
        pass

    @pytest.mark.parametrize("given", WELL.values(), ids=WELL)
    def test_need_none(self, read, given):
        given()

        assert read() == []

    def test_name_one_whose_consumer_is_frozen_and_what_waits(self, read):
        a_consumer(silent=160)
        a_backlog("a", "b")

        [one] = read()

        assert one.since - ago(seconds=160) < timedelta(seconds=10)
        assert one.line == (
            f"Group 'cart', since {one.since.isoformat()}: (outbox.no_consumer) No consumer is running (silent for 3 min), and 2 "
            "messages wait. Start outbox_consume --group cart."
        )

    def test_name_a_topic_that_the_broker_does_not_serve_as_configured(self, read):
        a_consumer(refusals={"parcels": "Its queues have another x-max-length."})

        [one] = read()

        assert (one.id, one.obj) == ("outbox.misconfigured", "group 'cart'")
        assert one.msg == "The broker does not serve topic 'parcels' as configured; other topics are not affected."
        assert one.error == "Its queues have another x-max-length."

    @pytest.mark.parametrize("silent", [5, 15])
    def test_name_a_consumer_of_celerys_that_beat_no_longer_calls(self, read, schedule, silent):
        schedule()  # without the group, which is in this project's code
        a_consumer(note="celery", silent=silent)
        a_backlog("a")

        assert [one.id for one in read()] == ["outbox.no_consumer"] * (silent > 8)

    def test_name_one_that_never_received_what_was_sent(self, read):
        sent(seconds=5)
        topic = Topic.objects.get(name="parcels")
        database.raw("default").execute("INSERT INTO outbox_lane VALUES (%s, 1, 1)", [topic.id])

        assert [(one.id, one.msg) for one in read()] == [
            ("outbox.no_consumer", "No consumer is running (none sends heartbeats), and the group has never received a message.")
        ]

    def test_name_one_whose_handler_hangs(self, read):
        a_consumer()
        a_backlog("a")
        handled(seconds=200)
        sent(seconds=100)

        [one] = read()

        assert one.id == "outbox.group_stuck"
        assert one.msg == "1 message of topic 'parcels' waits, and 1 consumer handled none for 100 s."

    def test_name_a_topic_that_stands_still_beside_one_that_flows(self, read, settings):
        letters = {"letters": {"TYPE": "normal"}}
        settings.OUTBOX = {**settings.OUTBOX, "TOPICS": {**settings.OUTBOX["TOPICS"], **letters}}
        consumer(topic="letters", group="cart")(lambda message, context: None)
        a_consumer()
        a_backlog("a")
        handled(seconds=200)
        sent(seconds=100)
        handled(seconds=1, topic="letters", number=100)

        assert [one.id for one in read()] == ["outbox.group_stuck"]

    def test_need_none_for_what_the_broker_is_to_deliver_later(self, read, settings):
        settings.OUTBOX = {**settings.OUTBOX, "TOPICS": {"parcels": {"TYPE": "delay"}}}
        a_consumer()
        a_backlog("a")
        sent(seconds=100)

        assert read() == []

    def test_name_a_message_that_keeps_failing_while_others_are_handled(self, read):
        a_consumer()
        handled(seconds=1, number=100)
        deferred(seconds=100, failures=2, waiting=True, fingerprint="ValueError in shop.add_points: boom")

        [one] = read()

        assert (one.id, one.error) == ("outbox.group_fails", "ValueError in shop.add_points: boom")
        assert one.msg == "1 message of topic 'parcels' failed and waits for a retry; the first one was deferred 100 s ago."

    def test_name_one_that_does_not_come_to_deferred_messages(self, read):
        a_consumer()
        deferred(seconds=300)

        [one] = read()

        assert (one.id, one.msg) == (
            "outbox.group_stuck",
            "Deferred messages of topic 'parcels' have been due for 5 min.",
        )

    def test_name_deferred_messages_without_a_consumer(self, read):
        deferred(seconds=5)

        [one] = read()

        assert one.id == "outbox.no_consumer"
        assert one.msg == "No consumer is running (none sends heartbeats), and 1 message waits."

    def test_name_deferred_messages_that_no_live_process_has_a_handler_for(self, read):
        a_consumer()
        deferred(seconds=300, no_code_since=ago(seconds=200))

        [one] = read()

        assert (one.id, one.msg) == (
            "outbox.no_handler",
            "1 deferred message of topic 'parcels', and no live process has a handler.",
        )

    def test_name_a_command_that_discards_no_message_that_has_a_handler(self, read):
        a_consumer()
        handlerless = deferred(seconds=300, no_code_since=ago(seconds=200))
        for state in ({"waiting": True}, {"dead": True}, {"held": True}):
            deferred(seconds=1, **state)

        [command] = [re.search(r"outbox_replay (.*)\.", one.hint)[1] for one in read() if one.id == "outbox.no_handler"]
        call_command("outbox_replay", *shlex.split(command), "--no-input")

        assert Deferred.objects.count() == 3
        assert not Deferred.objects.filter(id=handlerless.id).exists()

    @pytest.mark.parametrize(
        ("number", "told"),
        [
            (1, []),
            (
                2,
                [
                    "2 deferred messages of topic 'parcels' wait; at 4, consumers receive nothing from the topic until half of "
                    "them are gone."
                ],
            ),
            (
                4,
                [
                    "4 deferred messages of topic 'parcels' wait; consumers receive nothing from the topic until half of them "
                    "are gone."
                ],
            ),
        ],
    )
    def test_name_more_deferred_messages_than_half_of_the_limit(self, number, told, read, settings):
        settings.OUTBOX["CONSUMER"] = {"MAX_DEFERRED": 4}
        a_consumer()
        for _ in range(number):
            deferred(seconds=1)
        deferred(seconds=1, held=True)
        deferred(seconds=1, due_at=ago(hours=-2))

        assert [one.msg for one in read() if one.id == "outbox.max_deferred"] == told

    def test_name_what_the_server_gave_up_and_no_consumer_has_fetched(self, read, monkeypatch):
        a_consumer()
        monkeypatch.setattr(MemoryBroker, "backlog", lambda broker, group: Backlog({}, {"parcels": 3}))

        [one] = read()

        assert one.id == "outbox.given_up"
        assert one.msg == (
            "The broker moved 3 messages of topic 'parcels' to its dead-letter queue, and no consumer has fetched them."
        )

    def test_name_one_that_stands_still_though_nothing_is_known_of_what_was_sent(self, read):
        a_consumer()
        a_backlog("a", "b", "c")
        handled(seconds=400)

        [one] = read()

        assert one.id == "outbox.group_stuck"
        assert one.msg == "3 messages of topic 'parcels' wait, and 1 consumer handled none for 7 min."

    def test_name_a_message_whose_handler_hangs_while_others_are_handled(self, read):
        at_work(61.0)
        handled(seconds=1, number=100)

        [one] = read()

        assert one.id == "outbox.group_stuck"
        assert one.msg == "shop.add_points has been handling message m-1 of topic 'parcels' for 61 s."

    def test_name_a_hanging_handler_once_with_those_that_wait_behind_it(self, read):
        at_work(400.0)
        a_backlog("a", "b", "c")
        handled(seconds=400)

        assert [one.id for one in read()] == ["outbox.group_stuck"]

    def test_name_a_queue_that_was_deleted_with_what_waited_in_it(self, read):
        a_consumer(subscriptions=["parcels\x1fattention.parcel\x1f*"])
        handled(seconds=40)

        [one] = read()

        assert (one.id, one.obj) == ("outbox.misconfigured", "group 'cart'")
        assert one.msg.startswith("The broker no longer knows the group in topic 'parcels': its queue was deleted")

    def test_name_celery_where_its_beat_starts_the_consumers(self, read, schedule):
        schedule(consume=["cart"])
        a_backlog("a")

        [one] = [one for one in read() if one.id == "outbox.no_consumer"]

        assert one.hint == "Start outbox_consume --group cart, or check that Celery's worker and beat run."

    def test_name_messages_of_a_group_that_was_stopped_and_has_no_code_here(self, read, monkeypatch):
        a_backlog("a", "b")
        handled(seconds=400)
        monkeypatch.setattr(register, "registered", {})

        [one] = read()

        assert (one.id, one.obj) == ("outbox.no_consumer", "group 'cart'")
        assert one.hint.startswith("Start the consumers of the release that has the group.")

    def test_name_messages_of_a_group_whose_code_was_removed(self, read, monkeypatch):
        a_backlog("a", "b")
        handled(seconds=700)
        monkeypatch.setattr(register, "registered", {})

        [one] = read()

        assert (one.id, one.obj) == ("outbox.no_handler", "group 'cart'")
        assert one.msg == "2 messages of topic 'parcels' wait, and no handler takes them."
        assert one.hint.endswith("If it was removed for good, drop them: outbox_forget cart --topic parcels.")

    @pytest.mark.parametrize(("silent", "kinds"), [(0, []), (60, ["outbox.no_consumer"])])
    def test_have_a_handler_in_another_release_whose_process_has_taken_them_lately(self, silent, kinds, read, monkeypatch):
        a_backlog("a", "b")
        handled(seconds=1)
        monkeypatch.setattr(register, "registered", {})
        subscriptions = ["parcels\x1fattention.parcel\x1f*"]
        a_process("consumer", broker="another", consumer_group="cart", silent=silent, subscriptions=subscriptions)
        a_consumer(silent=silent, subscriptions=subscriptions)

        assert [one.id for one in read()] == kinds

    def test_have_no_handler_where_a_newer_release_has_replaced_the_one_that_took_them(self, read, monkeypatch, settings):
        a_backlog("a", "b")
        monkeypatch.setattr(register, "registered", {})
        settings.OUTBOX = {**settings.OUTBOX, "TOPICS": {"parcels": {}, "letters": {}}}
        consumer(topic="letters", group="cart")(lambda message, context: None)
        a_consumer(silent=60, subscriptions=["parcels\x1fattention.parcel\x1f*"])
        a_consumer(age=30, subscriptions=["letters\x1ftopic letters\x1f*"])

        assert [one.id for one in read()] == ["outbox.no_handler"]

    def test_name_messages_of_a_topic_whose_handler_was_removed(self, read, settings, monkeypatch):
        a_backlog("a", "b")
        monkeypatch.setattr(register, "registered", {})
        settings.OUTBOX = {**settings.OUTBOX, "TOPICS": {"parcels": {}, "letters": {}}}
        consumer(topic="letters", group="cart")(lambda message, context: None)
        a_consumer(subscriptions=["letters\x1ftopic letters\x1f*"])

        assert [(one.id, one.obj) for one in read()] == [("outbox.no_handler", "group 'cart'")]

    def test_name_each_group_of_a_process_that_fails(self, read):
        consumer(Parcel, group="points")(lambda message, context: None)
        error = {"consumer": "permission denied for table outbox_inbox"}
        a_consumer(errors=error)
        a_process("consumer", consumer_group="points", errors=error)
        Process.objects.update(pid=1)

        assert [(one.id, one.obj) for one in read()] == [
            ("outbox.process_fails", "group 'cart'"),
            ("outbox.process_fails", "group 'points'"),
        ]

    def test_name_one_whose_settings_lead_to_another_server(self, read, relay):
        Process.objects.update(server="KafkaBroker with SERVERS one")
        same = a_consumer(server="KafkaBroker with SERVERS one")
        a_consumer(server="KafkaBroker with SERVERS two")
        a_consumer(server="KafkaBroker with SERVERS three", silent=20)
        a_consumer()

        [differing] = [finding for finding in read() if finding.id == "outbox.servers_differ"]

        assert differing.obj == "group 'cart'"
        assert f"h:{same.pid + 1} uses KafkaBroker with SERVERS two" in differing.msg
        assert differing.msg.endswith("the relay h:1 sends to KafkaBroker with SERVERS one.")

    def test_name_a_consumer_that_fails_unless_its_broker_is_away(self, read, monkeypatch):
        a_consumer(errors={"consumer": "permission denied for table outbox_inbox"})

        [one] = read()
        monkeypatch.setattr(MemoryBroker, "backlog", nobody_answers)
        away = read()

        assert (one.id, one.obj) == ("outbox.process_fails", "group 'cart'")
        assert one.line.endswith(
            "permission denied for table outbox_inbox. Correct what the error names, such as a permission or a setting; the "
            "process tries again automatically."
        )
        assert [one.id for one in away] == ["outbox.broker_away"]

    def test_need_none_about_its_backlog_while_its_consumers_fail(self, read):
        a_consumer(errors={"consumer": "permission denied for table outbox_inbox"})
        a_backlog(*map(str, range(50)))
        handled(seconds=250, number=5)
        handled(seconds=200, number=5)
        sent(seconds=100)

        assert [one.id for one in read()] == ["outbox.process_fails"]

    def test_name_one_that_is_slow(self, read):
        a_consumer()
        a_backlog(*map(str, range(50)))
        handled(seconds=250, number=5)
        handled(seconds=1, number=5)

        [one] = read()

        assert one.id == "outbox.group_slow"
        assert one.msg.startswith("50 messages wait; at 2 a minute, as in the last minutes, that takes 2")

    def test_name_one_without_a_consumer_though_its_broker_cannot_tell(self, read, monkeypatch):
        def refuse(broker, group):
            raise BrokerCannotTell("OPTIONS name no server")

        monkeypatch.setattr(MemoryBroker, "backlog", refuse)
        sent(seconds=5)
        topic = Topic.objects.get(name="parcels")
        database.raw("default").execute("INSERT INTO outbox_lane VALUES (%s, 1, 1)", [topic.id])

        [one] = read()

        assert (one.id, one.msg) == (
            "outbox.no_consumer",
            "No consumer is running (none sends heartbeats), and the broker cannot tell the backlog.",
        )

    def test_show_what_is_known_when_a_broker_raises_whatever(self, read, monkeypatch):
        monkeypatch.setattr(MemoryBroker, "backlog", lambda broker, group: 1 / 0)

        assert [(one.id, one.error) for one in read()] == [("outbox.broker_away", "division by zero")]

    def test_name_dead_letters_as_long_as_there_are_any(self, read, relay):
        deferred(seconds=9, dead=True, fingerprint="ValueError: boom", topic="parcels")
        deferred(seconds=9, dead=True, group="gone")

        found = [(one.obj, one.msg, one.error) for one in read() if one.id == "outbox.dead_letters"]
        Deferred.objects.all().delete()

        assert found[0] == ("group 'cart'", "1 message of topic 'parcels' failed for good.", "ValueError: boom")
        assert found[1][0] == "group 'gone'"
        assert read() == []

    def test_name_a_transaction_that_has_been_open_for_long(self, read, relay, monkeypatch):
        monkeypatch.setattr("outbox.monitoring.attention.LONG_TRANSACTION", timedelta(0))
        with database.connect("default", application_name="a report") as other, other.transaction():
            other.execute("SELECT 1")

            found = [one.msg for one in read() if one.id == "outbox.long_transaction"]

        assert re.sub(r"[\d.]+ s", "0.1 s", found[0]).endswith("idle in transaction) has been open for 0.1 s.")

    def test_name_open_gaps(self, read):
        about = {"consumer_group": "cart", "source": "s", "topic": "orders", "lane": 1}
        Gap.objects.create(**about, first_number=3, last_number=5)
        Gap.objects.create(**about, first_number=9, last_number=9, closed_at=ago(seconds=1))

        assert [one.msg for one in read()] == ["3 messages of topic 'orders' did not arrive, in 1 gap."]

    def test_leave_out_what_is_silenced(self, read, settings):
        Gap.objects.create(consumer_group="cart", source="s", topic="orders", lane=1, first_number=3, last_number=5)
        settings.SILENCED_SYSTEM_CHECKS = ["outbox.gap"]

        assert read() == []

    def test_name_messages_that_no_group_handled(self, read, orders):
        headers = '{"ce-type": "tests.Placed"}'
        rows = MessageRowFactory.create_batch(3, topic=orders, headers=headers)
        for row in rows:
            about = {"idempotency_key": str(row.id), "message_id": row.id, "topic": "orders", "delivery_count": 0}
            Inbox.objects.create(consumer_group="cart", **about)
        Inbox.objects.create(consumer_group="points", **about | {"delivery_count": 1})
        DeferredFactory(consumer_group="points", message_id=rows[1].id)

        [one] = [one for one in read() if one.id == "outbox.ignored"]

        says = "1 message of type 'tests.Placed' came in the last hour, and no group handled it: cart had no handler."
        assert (one.obj, one.msg) == ("topic 'orders'", says)
