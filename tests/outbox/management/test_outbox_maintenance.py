import json
from datetime import UTC, datetime

import pytest
from django.core.management import call_command

from outbox import database
from outbox.database import partitions
from outbox.models import Duplicate
from tests.commands import refused
from tests.factories import MessageRowFactory, TicketFactory, message_id

pytestmark = pytest.mark.django_db(transaction=True)

NOON = datetime(2001, 2, 3, 12, tzinfo=UTC)


@pytest.fixture
def old_day():
    with database.connect("default") as own:
        partitions.create_partition(own, NOON.date())
        yield
        own.execute("DROP TABLE IF EXISTS outbox_message_20010203")


class TestOutboxMaintenance:
    def test_prunes_and_says_what(self, old_day, capsys):
        Duplicate.objects.create(consumer_group="g", message_id=message_id(), topic="t", delivery_count=2, dropped_at=NOON)

        call_command("outbox_maintenance", "--database", "default")

        assert capsys.readouterr().out == ("Database 'default'\n  2001-02-03 dropped\n  outbox_duplicate: 1 rows deleted\n")

    def test_ends_with_1_when_it_kept_something(self, old_day, capsys):
        TicketFactory(message=MessageRowFactory(id=message_id(NOON)))

        with pytest.raises(SystemExit) as end:
            call_command("outbox_maintenance", "--database", "default", "--json")

        assert end.value.code == 1
        assert json.loads(capsys.readouterr().out)["default"]["kept"] == {"2001-02-03": "waiting messages"}

    def test_says_when_there_is_nothing_to_do(self, capsys):
        call_command("outbox_maintenance", "--database", "default")

        assert capsys.readouterr().out == "Database 'default'\n  nothing to create, and nothing is past its retention\n"

    def test_ends_with_2_when_it_cannot_ask(self):
        with refused():
            call_command("outbox_maintenance", "--database", "nix")
