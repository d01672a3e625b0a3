import re
from datetime import UTC, datetime

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.urls import reverse

from outbox import consumer
from outbox.consuming import register
from outbox.models import Deferred, Gap, OperatorAct, State
from tests.factories import BatchFactory

pytestmark = pytest.mark.django_db

LIST = "admin:outbox_gap_changelist"


@pytest.fixture
def gap(orders, monkeypatch):
    """A group misses three numbers: of two messages, and one whose message is unknown."""
    monkeypatch.setattr(register, "registered", {**register.registered})
    consumer(topic="orders", group="cart")(lambda message: None)
    BatchFactory(topic=orders, size=2, first_seq=7, lane=1, state=State.SENT)
    with connection.cursor() as cursor:
        cursor.execute("SELECT id FROM outbox_source")
        [source] = cursor.fetchone()
    return Gap.objects.create(consumer_group="cart", source=source, topic="orders", lane=1, first_number=7, last_number=9)


def deliver(client, gap, **more):
    return client.post(reverse(LIST), {"action": "deliver", "_selected_action": [gap.pk], "index": "0", **more}, follow=True)


def test_lists_the_messages_of_a_gap(operator, gap):
    client = operator("view_gap")

    assert "lane 1, 7 to 9" in client.get(reverse(LIST)).text
    page = client.get(reverse("admin:outbox_gap_change", args=[gap.pk])).text

    assert page.count("<td>yes</td>") == 2
    assert "1 unknown" in page


@pytest.mark.parametrize(("state", "listed"), [("open", [7]), ("closed", [1]), ("xyz", [])])
def test_lists_the_gaps_of_a_state(state, listed, operator, gap):
    of_gap = {"consumer_group": "cart", "source": gap.source, "topic": "orders", "lane": 1}
    Gap.objects.create(**of_gap, first_number=1, last_number=2, closed_at=datetime.now(UTC))

    page = operator("view_gap").get(reverse(LIST), {"state": state})

    assert [row.first_number for row in page.context["cl"].result_list] == listed


def test_delivers_lost_messages_again(operator, gap):
    client = operator("view_gap", "replay_deferred")

    page = deliver(client, gap)
    assert "Not delivered: 1. Its row is gone" in page.text
    hidden = dict(re.findall(r'<input type="hidden" name="(as_of|shown)" value="([^"]*)"', page.text))
    page = deliver(client, gap, reason="a node was lost", **hidden)

    assert "Delivered again: 2." in page.text
    assert Deferred.objects.filter(consumer_group="cart", reason="lost").count() == 2
    assert {*OperatorAct.objects.values_list("act", "reason")} == {("delivered again", "a node was lost")}
    assert "Delivered again: 2" in LogEntry.objects.get().change_message


def test_leaves_gaps_alone_that_were_found_after_the_question(operator, gap):
    client = operator("view_gap", "replay_deferred")
    page = deliver(client, gap, select_across="1")
    hidden = dict(re.findall(r'<input type="hidden" name="(as_of|shown)" value="([^"]*)"', page.text))
    Gap.objects.update(found_at=datetime.now(UTC))

    page = deliver(client, gap, select_across="1", reason="because", **hidden)

    assert not Deferred.objects.exists()


def test_delivers_nothing_without_permission(operator, gap):
    deliver(operator("view_gap"), gap, reason="because")

    assert not Deferred.objects.exists()


def test_leaves_closed_gaps_alone(operator, gap):
    Gap.objects.update(closed_at="2026-01-01T12:00:00Z")

    page = deliver(operator("view_gap", "replay_deferred"), gap, reason="because")

    assert "Nothing was changed" in page.text
    assert not Deferred.objects.exists()
