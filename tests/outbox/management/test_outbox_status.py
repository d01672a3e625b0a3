import json
import re
import socket
import threading
from datetime import UTC, date, datetime, timedelta
from functools import partial
from uuid import uuid4

import pytest
from django.core.management import CommandError, call_command

from outbox import conf, consumer
from outbox.brokers.base import Backlog, Outgoing
from outbox.brokers.memory import MemoryBroker
from outbox.errors import BrokerUnavailable
from outbox.findings import risky_option
from outbox.management import found
from outbox.models import FailedSend, Process, State, Topic
from outbox.monitoring import find, groups
from outbox.testing.factories import DeferredFactory, FailedDeliveryFactory
from tests.commands import exit_code, refused
from tests.factories import BatchFactory, MessageRowFactory, TicketFactory, TopicFactory, message_id
from tests.outbox.consuming.messages import Placed

pytestmark = pytest.mark.django_db(transaction=True)


status = partial(exit_code, "outbox_status", "--database", "default")


class CarelessBroker(MemoryBroker):
    @classmethod
    def check_settings(cls, options, topics=()):
        return [risky_option(f"{topic.name} may be lost.", "Take care.") for topic in topics]


@pytest.fixture(autouse=True)
def _a_relay(db, no_consumers):
    Topic.objects.all().delete()
    Process.objects.create(kind="relay", host="shop", pid=7, broker="default")


@pytest.fixture
def cart(memory_brokers):
    """A group for which two messages wait."""
    consumer(Placed, group="cart")(lambda message, context: None)
    broker = conf.make_broker("default")
    broker.receive("cart", ["orders"], limit=1, invisible_for=timedelta(seconds=1), wait=timedelta(0))
    broker.send([Outgoing(name, "orders", b"{}") for name in "ab"])


class TestOutboxStatus:
    def test_keeps_what_others_said_within_its_line(self, capsys):
        topic = TopicFactory(name="orders")
        batch = BatchFactory(topic=topic, state=State.RELEASED, attempt=2, last_error="No.\n! All is well.\x1b[2J")
        FailedSend.objects.create(batch_id=batch.id, message_ids=batch.message_ids, attempt=2, verdict="misconfigured")

        status()

        said = capsys.readouterr().out
        assert r"No.\n! All is well.\x1b[2J" in said
        assert "\n! All" not in said

    def test_shows_a_table_for_people(self, capsys):
        topic = TopicFactory(name="orders", type="transaction")
        TicketFactory.create_batch(2, topic=topic)
        BatchFactory(topic=topic, size=3, state=State.DEAD)
        Process.objects.update(lane=1, note="long-running")

        status()

        assert re.sub(r"\d\.\d s", "0.0 s", capsys.readouterr().out).splitlines() == [
            "Database 'default'",
            "",
            "topic   broker   type         published  waiting  oldest  delayed  released  claimed  prepared  dead",
            "orders  default  transaction  once             2  0.0 s         0         0        0         0     3",
            "",
            "process  host  pid  broker   group  lane  breaker  by            heartbeat",
            "relay    shop    7  default            1  closed   long-running  0.0 s ago",
            "",
            "Needs attention:",
            "! Topic 'orders': (outbox.rejected) 3 messages are dead: rejected, without a row, or perhaps published. See the "
            "reasons with outbox_replay --unsent --topic orders; correct them, then add --all to send again, or --all --discard.",
        ]

    def test_shows_deliveries_that_failed(self, capsys):
        FailedDeliveryFactory(consumer_group="cart", fingerprint="ValueError: boom")

        status()

        assert re.sub(r"\d\.\d s", "0.0 s", capsys.readouterr().out).splitlines()[7:9] == [
            "group  topic   failed deliveries in the last hour  messages  dead letters  newest     error",
            "cart   orders                                   1         1             0  0.0 s ago  ValueError: boom",
        ]

    def test_shows_what_settings_accept_to_lose(self, settings, capsys):
        careless = {"default": {"BACKEND": f"{__name__}.CarelessBroker"}}
        settings.OUTBOX = {**settings.OUTBOX, "BROKERS": careless}

        code = status()

        assert code == 0  # it was chosen
        assert "~ Broker 'default': orders may be lost." in capsys.readouterr().out

    def test_shows_one_line_of_json(self, capsys):
        topic = TopicFactory(name="orders")
        TicketFactory(topic=topic)

        assert status("--json") == 0

        (database,) = json.loads(capsys.readouterr().out)["databases"]
        assert database["database"] == "default"
        assert database["topics"][0]["waiting"] == 1
        assert database["findings"] == []

    def test_ends_with_0_when_nothing_needs_attention(self, capsys):
        assert status() == 0
        assert capsys.readouterr().out.endswith("\n\nNothing needs attention.\n")

    def test_shows_the_groups_and_what_waits_for_them(self, cart, capsys):
        DeferredFactory(consumer_group="cart", waiting=True)

        assert status() == 1  # nobody consumes

        assert capsys.readouterr().out.splitlines()[7:9] == [
            "group  broker   topic   waiting  deferred  dead letters  consumers  handled per minute  ignored per minute",
            "cart   default  orders        2         1             0          0                   0                   0",
        ]

    def test_shows_which_broker_cannot_be_asked(self, cart, monkeypatch, capsys):
        def refuse(broker, group):
            raise BrokerUnavailable("nobody answers")

        monkeypatch.setattr(MemoryBroker, "backlog", refuse)

        assert status("--json") == 1

        (database,) = json.loads(capsys.readouterr().out)["databases"]
        assert database["groups"][0]["trouble"] == "nobody answers"
        assert database["findings"][0]["id"] == "outbox.broker_away"

    def test_says_since_when(self, capsys):
        Process.objects.update(beat_at="2026-01-01T12:00:00Z")

        status("--json")
        status()

        said = capsys.readouterr().out
        (database,) = json.loads(said.partition("\n")[0])["databases"]
        [no_relay] = [one for one in database["findings"] if one["id"] == "outbox.no_relay"]
        assert abs(datetime.fromisoformat(no_relay["since"]) - datetime(2026, 1, 1, 12, tzinfo=UTC)) < timedelta(seconds=5)
        assert "! Broker 'default', since 2026-01-01T1" in said

    def test_waits_for_no_broker_for_long(self, cart, monkeypatch, capsys):
        is_over = threading.Event()
        monkeypatch.setattr(MemoryBroker, "backlog", lambda broker, group: is_over.wait() and Backlog({}))
        monkeypatch.setattr(groups, "ANSWER_WITHIN_SECONDS", 0.1)

        assert status() == 1
        is_over.set()

        assert "! Broker 'default': (outbox.broker_away) It cannot be reached. No answer within" in capsys.readouterr().out

    def test_folds_away_processes_that_others_have_replaced(self, capsys):
        Process.objects.create(kind="relay", host="shop", pid=6, broker="default")
        long_ago = datetime.now(UTC) - timedelta(minutes=3)
        Process.objects.filter(pid=6).update(started_at=long_ago, beat_at=long_ago)

        assert status() == 0
        assert "\nSilent, and replaced by others: 1.\n" in capsys.readouterr().out

    def test_ends_with_1_when_something_does(self):
        BatchFactory(state=State.DEAD)

        assert status() == 1

    def test_ends_with_2_when_it_cannot_ask(self):
        with refused("There is no database 'nix'"):
            call_command("outbox_status", "--database", "nix")


class TestMessage:
    @pytest.fixture
    def publish(self):
        """Publish a message that waits, as seconds after noon."""
        topic = TopicFactory(name="orders")

        def publish(second=0, **fields):
            at = datetime(2026, 3, 1, 12, tzinfo=UTC) + timedelta(seconds=second)
            row = MessageRowFactory(topic=topic, id=message_id(at), created_at=at, **fields)
            TicketFactory(topic=topic, message=row)
            return row

        return publish

    def test_is_shown_with_what_it_waits_for_and_its_timeline(self, publish, capsys):
        Process.objects.all().delete()
        row = publish(key="536365", about="shop.order:7", headers='{"ce-type": "OrderPlaced"}')

        assert status("--message", str(row.id)) == 0
        assert capsys.readouterr().out.splitlines() == [
            f"Message {row.id}, OrderPlaced, topic orders, key 536365, about shop.order:7, waiting, "
            "published 2026-03-01T12:00:00+00:00",
            "Broker 'default': (outbox.no_relay) No relay is running. Start outbox_relay, or check that Celery's worker and beat "
            "run. Messages wait meanwhile.",
            "  2026-03-01T12:00:00+00:00  Published in topic orders, by the publisher's transaction",
        ]

    @pytest.mark.parametrize("what", ["536365", "shop.Order: 7", "invoice=536365", "customer.id=7"])
    def test_is_found_by_what_is_known_of_it(self, what, publish, capsys):
        row = publish(key="536365", about="shop.order:7", body=b'{"invoice": "536365", "customer": {"id": 7}}')
        publish(1, key="5")

        assert status("--message", what) == 0
        assert re.findall(r"^Message (\S+),", capsys.readouterr().out, re.M) == [str(row.id)]

    def test_is_one_of_several_without_a_timeline(self, publish, capsys):
        rows = [publish(second, key="k") for second in range(2)]

        assert status("--message", "k") == 0

        out = capsys.readouterr().out
        assert re.findall(r"^Message (\S+),", out, re.M) == [str(rows[1].id), str(rows[0].id)]
        assert "Published" not in out

    @pytest.mark.parametrize("what", ["k", "a=1"])
    def test_is_looked_for_in_a_time(self, what, publish, capsys):
        rows = [publish(second, key="k", body=b'{"a":1}') for second in range(3)]

        assert status("--message", what, "--since", "2026-03-01T12:00:01", "--until", "2026-03-01T12:00:02", "--json") == 0

        (database,) = json.loads(capsys.readouterr().out)["databases"]
        assert [one["id"] for one in database["messages"]] == [str(rows[1].id)]

    def test_is_written_in_json(self, publish, capsys):
        row = publish(key="k", headers='{"ce-type": "OrderPlaced"}')

        assert status("--message", "k", "--json") == 0

        (database,) = json.loads(capsys.readouterr().out)["databases"]
        assert database == {
            "database": "default",
            "messages": [
                {
                    "id": str(row.id),
                    "topic": "orders",
                    "type": "OrderPlaced",
                    "key": "k",
                    "about": "",
                    "state": "waiting",
                    "published_at": "2026-03-01T12:00:00+00:00",
                    "why": "It is the next message that the relay sends.",
                }
            ],
            "is_cut": False,
            "reached": None,
            "is_late": False,
            "timeline": [
                {
                    "at": "2026-03-01T12:00:00+00:00",
                    "what": "Published",
                    "who": "",
                    "by": "",
                    "text": "in topic orders, by the publisher's transaction",
                }
            ],
        }

    def test_says_that_there_are_more(self, publish, monkeypatch, capsys):
        monkeypatch.setattr(found, "SHOWN", 1)
        for second in range(2):
            publish(second, key="k")

        assert status("--message", "k") == 0
        assert capsys.readouterr().out.endswith(
            "\n\nThere are more: these are the newest 1. Narrow the search with --since and --until.\n"
        )

    def test_says_how_far_bodies_were_read(self, publish, monkeypatch, capsys):
        monkeypatch.setattr(find, "MAX_MESSAGES_READ", 1)
        for second in range(3):
            publish(second, body=b'{"a":1}' if second == 0 else b"{}")

        assert status("--message", "a=1") == 1
        assert capsys.readouterr().out.splitlines() == [
            "No such message among those that were read.",
            "",
            "Only messages since 2026-03-01T12:00:01.000+00:00 were read, since bodies have no index. For older ones: "
            "--until 2026-03-01T12:00:01.000+00:00",
        ]
        assert status("--message", "a=1", "--until", "2026-03-01T12:00:01.000+00:00") == 0

    def test_says_that_the_search_took_too_long(self, publish, monkeypatch, capsys):
        monkeypatch.setattr(find, "CANDIDATES", f"SELECT pg_sleep(20) FROM ({find.CANDIDATES}) one")
        monkeypatch.setattr(find, "MAX_SECONDS", 0.0)
        publish(body=b'{"a":1}')

        assert status("--message", "a=1") == 1
        assert "The search took longer than 10 s. Narrow it with --since and --until." in capsys.readouterr().out

    def test_keeps_what_others_wrote_within_its_line(self, publish, capsys):
        publish(key="k", headers=json.dumps({"ce-type": "\nNothing needs attention.\x1b[2J"}))

        assert status("--message", "k") == 0
        assert r"\nNothing needs attention.\x1b[2J" in capsys.readouterr().out

    def test_ends_with_1_when_there_is_none(self, capsys):
        for what in (str(uuid4()), "nix", "shop.order:7", "a=1"):
            assert status("--message", what) == 1
            assert capsys.readouterr().out.startswith("No such message")

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            (["--message", ""], "invalid message value"),
            (["--message", "a\nb"], "invalid message value"),
            (["--message", "k", "--since", "yesterday"], "invalid time value"),
            (["--since", "2h"], "--since and --until can only be used with --message"),
            (["--message", "k", "--since", "2026-03-02", "--until", "2026-03-01"], "is not before --until"),
        ],
    )
    def test_refuses_what_it_cannot_read(self, arguments, error):
        with pytest.raises(CommandError, match=error):
            status(*arguments)


class TestOverdueDays:
    def test_are_printed_as_json(self, capsys, monkeypatch):
        monkeypatch.setattr("outbox.monitoring.status.overdue", lambda days: [date(2001, 2, 3)])

        assert status("--json") == 1
        assert json.loads(capsys.readouterr().out)["databases"][0]["overdue"] == ["2001-02-03"]


class TestAlive:
    @pytest.fixture
    def heard(self):
        """A process was heard of so many seconds ago, on this host by default."""

        def heard(seconds, host=None, kind="relay", pid=7):
            process = Process.objects.create(kind=kind, host=host or socket.gethostname(), pid=pid, broker="default")
            Process.objects.filter(pk=process.pk).update(beat_at=datetime.now(UTC) - timedelta(seconds=seconds))

        return heard

    @pytest.mark.parametrize(("seconds", "code"), [(20, 0), (40, 1)])
    def test_asks_for_a_heartbeat_of_the_last_30_seconds(self, seconds, code, heard, capsys):
        heard(seconds)

        assert status("--alive", "relay") == code
        assert capsys.readouterr().out == f"The relay on this host has sent its last heartbeat {seconds} s ago.\n"

    def test_ends_with_1_when_there_is_none(self, heard, capsys):
        heard(0, kind="consumer")
        heard(0, host="another")

        assert status("--alive", "relay") == 1
        assert capsys.readouterr().out == "The relay on this host has sent no heartbeat.\n"

    @pytest.mark.parametrize(("seconds", "code"), [(20, 0), (40, 1)])
    def test_says_the_same_as_json(self, seconds, code, heard, capsys):
        heard(seconds)

        assert status("--alive", "relay", "--json") == code
        said = json.loads(capsys.readouterr().out)
        assert said == {"process": "relay", "is_alive": code == 0, "silent_seconds": pytest.approx(seconds, abs=5)}

    def test_takes_the_newest_heartbeat(self, heard):
        heard(40, pid=7)
        heard(0, pid=8)

        assert status("--alive", "relay") == 0

    def test_does_not_mind_what_needs_attention(self, heard):
        heard(0)
        BatchFactory(state=State.DEAD)

        assert status("--alive", "relay") == 0
