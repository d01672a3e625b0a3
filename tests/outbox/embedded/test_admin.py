import sys
from datetime import UTC, datetime

import pytest
from django.contrib.admin.models import LogEntry
from django.urls import reverse

from outbox import database
from outbox.check_backs.register import check_back
from outbox.embedded.half_state import HalfState
from outbox.embedded.models import EmbeddedHalf, EmbeddedMessage, EmbeddedTopic
from outbox.ids import topic_number
from outbox.message import COMMIT, UNKNOWN
from outbox.models import CheckBack

pytestmark = pytest.mark.django_db(transaction=True)

LIST = "admin:outbox_embedded_embeddedhalf_changelist"
ALL = ["view_embeddedhalf", "ask_embeddedhalf"]


@pytest.fixture
def half(db):
    """Return a function that stores half messages of another producer, with check-backs."""
    topic = EmbeddedTopic.objects.create(id=topic_number("orders"), name="orders", type="transaction", queues=1)

    def half(number=1, state=HalfState.PARKED):
        now = datetime.now(UTC)
        shared = {
            "topic_id": topic.id,
            "queue": 0,
            "source": "s",
            "key": "",
            "tag": "",
            "headers": "{}",
            "body": b"{}",
            "token": "",
        }
        return EmbeddedHalf.objects.create(
            id=number, message_id=f"m{number}", born_at=now, ask_at=now, asked=15, state=state, **shared
        )

    yield half
    database.raw("default").execute("TRUNCATE outbox_embedded_topic, outbox_embedded_half, outbox_embedded_message")


@pytest.fixture
def answering(monkeypatch):
    """Register a check-back function for other producers' half messages."""
    monkeypatch.setattr(sys.modules["outbox.check_backs.register"], "registered", {})  # the package has a function of its name

    def answering(resolution):
        check_back("orders")(lambda half: resolution)

    return answering


def ask(client, *numbers):
    return client.post(
        reverse(LIST), {"action": "ask", "_selected_action": [str(one) for one in numbers], "index": "0"}, follow=True
    )


class TestList:
    def test_shows_what_is_unresolved_with_its_asks(self, half, operator):
        for number, state in enumerate(HalfState, start=1):
            half(number, state)

        page = operator(*ALL).get(reverse(LIST))

        assert {row.id for row in page.context["cl"].result_list} == {1, 2}
        assert '<td class="field-asks">15</td>' in page.text

    def test_shows_others_on_demand(self, half, operator):
        half(1, HalfState.ROLLED_BACK)
        client = operator(*ALL)

        shown = {
            state: len(client.get(reverse(LIST), {"state": state}).context["cl"].result_list)
            for state in ("undecided", "parked", "rolled_back", "nix")
        }

        assert shown == {"undecided": 0, "parked": 0, "rolled_back": 1, "nix": 0}

    def test_is_empty_where_no_broker_is_embedded(self, settings, operator):
        settings.OUTBOX = {"BROKERS": {"default": {"BACKEND": "outbox.brokers.memory.MemoryBroker"}}, "TOPICS": {"orders": {}}}

        assert operator(*ALL).get(reverse(LIST)).context["cl"].result_count == 0


class TestAsk:
    def test_ends_a_half_as_the_resolver_answers_and_records_it(self, half, answering, operator):
        half()
        answering(COMMIT)

        page = ask(operator(*ALL), 1)

        assert "Half message 1 of message m1: COMMIT." in page.text
        assert EmbeddedMessage.objects.get().message_id == "m1"
        assert CheckBack.objects.values_list("asked_by", "answer", "asked").get() == ("admin", "COMMIT", 16)
        assert LogEntry.objects.get().get_change_message() == "Checked back: COMMIT."

    def test_leaves_it_where_nothing_is_known(self, half, answering, operator):
        half()
        answering(UNKNOWN)

        ask(operator(*ALL), 1)

        assert EmbeddedHalf.objects.values_list("state", "asked").get() == (HalfState.PARKED, 16)

    def test_says_so_when_another_operator_was_faster(self, half, answering, operator):
        half()
        answering(COMMIT)
        client = operator(*ALL)
        ask(client, 1)

        page = ask(client, 1)

        assert "No check-back was needed: they have ended." in page.text
        assert EmbeddedMessage.objects.count() == 1

    def test_is_hidden_and_forbidden_without_its_permission(self, half, answering, operator):
        half()
        answering(COMMIT)
        client = operator("view_embeddedhalf")

        page = client.get(reverse(LIST)).text
        ask(client, 1)

        assert 'value="ask"' not in page
        assert EmbeddedHalf.objects.get().state == HalfState.PARKED
        assert not CheckBack.objects.exists()
