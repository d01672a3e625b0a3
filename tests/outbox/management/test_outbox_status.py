import json
import re
from uuid import uuid4

import pytest
from django.core.management import CommandError, call_command

from outbox.models import FailedDelivery, Process, State, Topic
from tests.factories import BatchFactory, TicketFactory, TopicFactory

pytestmark = pytest.mark.django_db(transaction=True)


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
