import re
import threading
from datetime import timedelta

import psycopg
import pytest

from outbox import atomic, database, publish_raw
from outbox.batches.claim import CLAIM_TOPIC
from outbox.brokers.base import SendResult, SendStatus
from outbox.brokers.memory import MemoryBroker
from outbox.database.locks import IS_LANE_FREE
from outbox.embedded import EmbeddedBroker
from outbox.errors import ConfigurationError, LaneBlocked, LaneNotHeld, NotMigrated
from outbox.models import Batch, MessageState, Process, State, Topic
from outbox.relay import hosts
from outbox.relay.hosts import NO_IDLE_TIMEOUT, RelayTarget
from outbox.relay.lane import take_lane
from outbox.relay.send import ROWS
from outbox.relay.wakeup import Waker
from tests.factories import BatchFactory, DelayedFactory
from tests.outbox.relay.outages import open_broker
from tests.waiting import wait_until

POST = RelayTarget("default", "default")
LONG = timedelta(seconds=30)
CLAIM = {"topic": 1, "broker": "default", "without": [], "in_transactions": False, "lane": 1, "lease": LONG, "scan_from": 0}


class TestPosts:
    @pytest.fixture(autouse=True)
    def _two_brokers(self, settings):
        memory = {"BACKEND": "outbox.brokers.memory.MemoryBroker"}
        settings.OUTBOX = {
            "BROKERS": {"default": memory, "second": memory, "unused": memory},
            "TOPICS": {"orders": {}, "mails": {"BROKER": "second"}},
        }

    def test_join_each_database_with_each_broker_that_has_topics(self):
        assert hosts.relay_targets() == [
            *(RelayTarget("default", "default"), RelayTarget("default", "second")),
            *(RelayTarget("other", "default"), RelayTarget("other", "second")),
        ]

    def test_can_be_chosen(self):
        assert hosts.relay_targets(["other"], ["second"]) == [RelayTarget("other", "second")]

    def test_leave_databases_to_the_routers(self, settings):
        settings.DATABASE_ROUTERS = ["tests.outbox.relay.test_hosts.OnlyOther"]

        assert hosts.databases() == ["other"]

    @pytest.mark.parametrize(("databases", "brokers"), [(["nix"], None), (None, ["nix"])])
    def test_refuse_what_is_not_in_settings(self, databases, brokers):
        with pytest.raises(ConfigurationError, match=r"There is no .* 'nix' in settings"):
            hosts.relay_targets(databases, brokers)


@pytest.mark.django_db(transaction=True)
class TestOpenRunner:
    def test_takes_another_lane_than_one_that_was_blocked(self, settings, monkeypatch):
        memory = {"BACKEND": "outbox.brokers.memory.MemoryBroker", "OPTIONS": {"TRANSACTIONS": True}}
        settings.OUTBOX = {"BROKERS": {"default": memory}, "TOPICS": {"orders": {}}, "RELAY": {"LANES": 2}}

        def blocked(self, source, lane):
            raise LaneBlocked("Its transaction cannot end.")

        with monkeypatch.context() as patch:
            patch.setattr(MemoryBroker, "open_lane", blocked)
            with pytest.raises(LaneBlocked), hosts.open_runner(POST, note="test") as first:
                first.run(at_most=LONG)

        with hosts.open_runner(POST, note="test") as second, hosts.open_runner(POST, note="test") as third:
            assert [runner.relay.lane for runner in (first, second, third)] == [1, 2, 1]

    @pytest.mark.parametrize(("statement", "arguments"), [(ROWS, [[1], 1, 1000]), (CLAIM_TOPIC, CLAIM)], ids=["rows", "claim"])
    def test_reads_no_table_as_a_whole_whatever_its_statistics_say(self, statement, arguments):
        with hosts.open_runner(POST, note="test") as runner:
            connection = runner.relay.connection
            connection.execute("VACUUM ANALYZE outbox_message, outbox_batch, outbox_ticket")  # all empty

            plan = connection.execute(f"EXPLAIN {statement}", arguments).fetchall()

        assert not re.search(r"Seq Scan on outbox_(message|batch|ticket)", "\n".join(line for (line,) in plan))


class OnlyOther:
    def allow_migrate(self, db, app_label, **hints):
        return db == "other"


@pytest.fixture(autouse=True)
def _no_wakeup(settings):
    settings.OUTBOX = {**settings.OUTBOX, "CELERY_WAKEUP": False}


def publish():
    with atomic():
        return publish_raw("orders", {}).message_id


def state_of(message_id):
    return MessageState.objects.get(id=message_id).state


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("own")
class TestOnDuty:
    def test_holds_the_lowest_free_lane_until_it_leaves(self, connect):
        first = take_lane(connect(), lanes=16)

        with hosts.open_runner(POST, note="test") as runner:
            assert (first, runner.relay.lane) == (1, 2)
        other = connect()
        # The server ends a session, and with it the lane's lock, after its client has left.
        wait_until(lambda: other.execute(f"SELECT {IS_LANE_FREE.format(lane=2)}").fetchone() == (True,))

        assert take_lane(other, lanes=16) == 2

    def test_leaves_when_all_lanes_are_held(self, settings, connect):
        settings.OUTBOX = {**settings.OUTBOX, "RELAY": {"LANES": 1}}
        take_lane(connect(), lanes=1)

        with pytest.raises(LaneNotHeld), hosts.open_runner(POST, note="test"):
            pass

    def test_closes_broker_and_connections(self, own):
        with hosts.open_runner(POST, note="test") as runner:
            runner.run(idle_timeout=timedelta(milliseconds=1))

        open_ones = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'outbox %' AND datname=current_database()"
        wait_until(lambda: own.execute(open_ones).fetchone() == (0,))

    def test_closes_the_broker_also_when_it_fails(self, monkeypatch):
        closed = []
        monkeypatch.setattr(EmbeddedBroker, "close", lambda self: closed.append(self))

        with pytest.raises(ZeroDivisionError), hosts.open_runner(POST, note="test") as runner:
            raise ZeroDivisionError

        assert closed == [runner.relay.broker]

    def test_raises_its_own_error_while_its_heartbeat_cannot_be_sent(self, monkeypatch, caplog):
        connect = database.connect

        def refuse_heartbeats(alias, *, application_name="outbox", **options):
            if application_name == "outbox heartbeat":
                raise psycopg.OperationalError("the database system is shutting down")
            return connect(alias, application_name=application_name, **options)

        monkeypatch.setattr(database, "connect", refuse_heartbeats)

        with pytest.raises(ZeroDivisionError), hosts.open_runner(POST, note="test"):
            raise ZeroDivisionError

        assert "could not be sent: the database system is shutting down" in caplog.text

    def test_writes_topics_that_are_missing(self, settings):
        Topic.objects.all().delete()
        settings.OUTBOX = {**settings.OUTBOX}  # read again, and with it each process writes its topics again

        with hosts.open_runner(POST, note="test"):
            assert Topic.objects.filter(name="orders").exists()

    def test_refuses_a_database_without_tables(self, own):
        own.execute("ALTER TABLE outbox_wakeup RENAME TO elsewhere")
        try:
            with pytest.raises(NotMigrated, match=r"manage\.py migrate --database default"), hosts.open_runner(POST, note="test"):
                pass
        finally:
            own.execute("ALTER TABLE elsewhere RENAME TO outbox_wakeup")


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("own")
class TestDuty:
    def test_sends_what_waits(self):
        message_id = publish()

        done = hosts.run_once(POST, note="test", at_most=LONG, idle_timeout=NO_IDLE_TIMEOUT)

        assert (done.sent, state_of(message_id)) == (1, "sent")

    def test_sends_what_is_due(self):
        delayed = DelayedFactory(topic=Topic.objects.get(name="orders"))

        hosts.run_once(POST, note="test", at_most=LONG, idle_timeout=NO_IDLE_TIMEOUT)

        assert state_of(delayed.message_id) == "sent"

    def test_takes_up_what_a_dead_relay_left(self):
        batch = BatchFactory(topic=Topic.objects.get(name="orders"), owner=9)

        hosts.run_once(POST, note="test", at_most=LONG, idle_timeout=NO_IDLE_TIMEOUT)

        batch.refresh_from_db()
        assert (batch.state, batch.attempt) == (State.SENT, 2)

    def test_settles_what_was_decided_and_never_committed(self, settings, monkeypatch):
        settings.OUTBOX = {**settings.OUTBOX, "RELAY": {"SWEEP_AGE": timedelta(0)}}
        message_id = publish()
        monkeypatch.setattr("outbox.relay.commit.Committer.commit", lambda self, decided: [])
        hosts.run_once(POST, note="test", at_most=LONG, idle_timeout=NO_IDLE_TIMEOUT)
        assert state_of(message_id) == "prepared"
        monkeypatch.undo()

        hosts.run_once(POST, note="test", at_most=LONG, idle_timeout=NO_IDLE_TIMEOUT)

        assert state_of(message_id) == "sent"

    def test_forgets_idle_relays_that_died(self, own):
        own.execute("INSERT INTO outbox_wakeup VALUES ('default', 15)")

        hosts.run_once(POST, note="test", at_most=LONG, idle_timeout=NO_IDLE_TIMEOUT)

        assert own.execute("SELECT count(*) FROM outbox_wakeup").fetchone() == (0,)

    def test_says_that_it_lives(self):
        hosts.run_once(POST, note="test", at_most=LONG, idle_timeout=NO_IDLE_TIMEOUT)

        row = Process.objects.get()
        assert (row.kind, row.broker, row.lane, row.note) == ("relay", "default", 1, "test")

    def test_comes_away_in_time_though_messages_keep_coming(self, monkeypatch):
        with hosts.open_runner(POST, note="test") as runner:
            step = runner.relay.step

            def step_and_publish(new):
                publish()
                return step(new)

            monkeypatch.setattr(runner.relay, "step", step_and_publish)
            done = runner.run(at_most=timedelta(milliseconds=300), idle_timeout=NO_IDLE_TIMEOUT)

        assert 0 < done.sent < 1000

    def test_lingers_for_what_comes_a_moment_later(self, own):
        done = []

        def visit():
            done.append(hosts.run_once(POST, note="test", at_most=LONG, idle_timeout=timedelta(seconds=2)))

        visitor = threading.Thread(target=visit)
        visitor.start()
        wait_until(lambda: own.execute("SELECT EXISTS (SELECT FROM outbox_wakeup)").fetchone()[0])
        publish()
        visitor.join()

        assert done[0].sent == 1

    def test_does_not_linger_beside_another_idle_relay(self, own, connect):
        lane = take_lane(connect(), lanes=16)
        own.execute("INSERT INTO outbox_wakeup VALUES ('default', %s)", [lane])
        visitor = threading.Thread(
            target=hosts.run_once, args=[POST], kwargs={"note": "test", "at_most": LONG, "idle_timeout": timedelta(seconds=20)}
        )

        visitor.start()
        visitor.join(10)

        assert not visitor.is_alive()

    def test_looks_once_more_between_its_announcement_and_the_first_wait(self, monkeypatch):
        """Otherwise a message committed between the claim and the announcement would have to wait."""
        done = []
        with hosts.open_runner(POST, note="test") as runner:

            def note(target, name):
                act = getattr(target, name)
                monkeypatch.setattr(target, name, lambda *args: (done.append(name), act(*args))[1])

            note(runner.relay, "step")
            note(Waker, "announce")
            monkeypatch.setattr(Waker, "wait", lambda *args: (done.append("wait"), runner.stop()))
            runner.run(idle_timeout=LONG)

        assert done == ["step", "announce", "step", "wait"]

    def test_is_not_idle_any_more_when_it_is_over(self, own):
        hosts.run_once(POST, note="test", at_most=LONG, idle_timeout=timedelta(milliseconds=50))

        assert own.execute("SELECT count(*) FROM outbox_wakeup").fetchone() == (0,)

    def test_finds_the_breaker_as_the_visit_before_left_it(self, monkeypatch):
        monkeypatch.setattr("outbox.relay.rounds.BREAKER_BASE", timedelta(days=99))
        monkeypatch.setattr("outbox.relay.rounds.BREAKER_LIMIT", timedelta(days=99))
        calls = []

        def be_away(self, messages):
            calls.append(messages)
            return [SendResult(SendStatus.UNAVAILABLE, reason="away")] * len(messages)

        monkeypatch.setattr(EmbeddedBroker, "send_halves", be_away)
        for _ in range(6):
            publish()
            hosts.run_once(POST, note="test", at_most=LONG, idle_timeout=NO_IDLE_TIMEOUT)

        assert len(calls) == 3

    def test_has_a_closed_breaker_when_settings_have_changed(self, settings):
        with hosts.open_runner(POST, note="test") as runner:
            before = runner.relay.breakers
        settings.OUTBOX = {**settings.OUTBOX, "RELAY": {"BATCH_SIZE": 5}}

        with hosts.open_runner(POST, note="test") as runner:
            assert runner.relay.breakers is not before

    def test_claims_nothing_and_is_over_while_the_broker_is_unavailable(self, monkeypatch):
        monkeypatch.setattr("outbox.relay.rounds.BREAKER_BASE", timedelta(days=99))
        monkeypatch.setattr("outbox.relay.rounds.BREAKER_LIMIT", timedelta(days=99))
        publish()
        with hosts.open_runner(POST, note="test") as runner:
            open_broker(runner.relay.breakers)

            runner.run(idle_timeout=LONG)

        assert not Batch.objects.exists()
