import json
import re
import socket
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from django.core.management import CommandError, call_command

from outbox.brokers.base import Problem
from outbox.brokers.memory import MemoryBroker
from outbox.models import FailedDelivery, Process, State, Topic
from tests.factories import BatchFactory, TicketFactory, TopicFactory

pytestmark = pytest.mark.django_db(transaction=True)


class CarelessBroker(MemoryBroker):
    @classmethod
    def check_topics(cls, options, topics):
        return [Problem(f"{topic.name} may be lost.", "Take care.", is_error=False) for topic in topics]


def status(*arguments):
    """Run the command; give its exit code."""
    try:
        call_command("outbox_status", "--database", "default", *arguments)
    except SystemExit as end:
        return end.code
    return 0


@pytest.fixture(autouse=True)
def _no_other_topics(db):
    Topic.objects.all().delete()


class TestOutboxStatus:
    def test_shows_a_table_for_people(self, capsys):
        topic = TopicFactory(name="orders", type="transaction")
        TicketFactory.create_batch(2, topic=topic)
        BatchFactory(topic=topic, size=3, state=State.DEAD)
        Process.objects.create(kind="relay", host="shop", pid=7, broker="default", lane=1, note="resident")

        status()

        assert re.sub(r"\d\.\d s", "0.0 s", capsys.readouterr().out).splitlines() == [
            "Database 'default'",
            "",
            "topic   broker   type         waiting  oldest  delayed  released  claimed  prepared  dead",
            "orders  default  transaction        2  0.0 s         0         0        0         0     3",
            "",
            "process  host  pid  broker   group  lane  breaker  by        heard of",
            "relay    shop    7  default            1  closed   resident  0.0 s ago",
            "",
            "! orders: 3 dead. See outbox_retry; --skip lets them rest.",
        ]

    def test_shows_deliveries_that_failed(self, capsys):
        FailedDelivery.objects.create(
            consumer_group="cart", topic="orders", nth=1, message_id=uuid4(), outcome="retry", fingerprint="ValueError: boom"
        )

        status()

        assert re.sub(r"\d\.\d s", "0.0 s", capsys.readouterr().out).splitlines()[6:8] == [
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
        assert database["concerns"] == []

    def test_ends_with_0_when_nothing_needs_a_person(self, capsys):
        assert status() == 0
        assert capsys.readouterr().out.endswith("No process was heard of.\n\nNothing needs a person.\n")

    def test_ends_with_1_when_something_does(self):
        BatchFactory(state=State.DEAD)

        assert status() == 1

    def test_ends_with_2_when_it_cannot_ask(self):
        with pytest.raises(CommandError, match="There is no database 'nix'") as error:
            call_command("outbox_status", "--database", "nix")

        assert error.value.returncode == 2


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
        assert capsys.readouterr().out == f"The relay on this host was heard of {seconds} s ago.\n"

    def test_ends_with_1_when_none_was_heard_of(self, heard, capsys):
        heard(0, kind="consumer")
        heard(0, host="another")

        assert status("--alive", "relay") == 1
        assert capsys.readouterr().out == "The relay on this host was never heard of.\n"

    def test_takes_the_one_heard_of_last(self, heard):
        heard(40, pid=7)
        heard(0, pid=8)

        assert status("--alive", "relay") == 0

    def test_does_not_mind_what_needs_a_person(self, heard):
        heard(0)
        BatchFactory(state=State.DEAD)

        assert status("--alive", "relay") == 0
