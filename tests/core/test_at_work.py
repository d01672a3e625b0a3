"""What the core does, it does without the apps: a message's whole life, and everything that looks at it."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from django.apps import apps
from django.contrib import admin
from django.urls import reverse

from outbox import Message, atomic, conf, database, publish
from outbox.consuming import register
from outbox.database import heartbeats, partitions
from outbox.models import Batch, CheckBack, Inbox, MessageRow, State
from outbox.monitoring.health import Health, health, readiness
from outbox.monitoring.timeline import read_timeline
from outbox.relay.hosts import NO_IDLE_TIMEOUT, RelayTarget, run_once
from outbox.relay.maintenance import prune
from tests.commands import run
from tests.factories import MessageRowFactory, message_id

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

LONG_AGO = datetime(2001, 2, 3, 12, tzinfo=UTC)


class Placed(Message):
    order: int

    class Meta:
        topic = "orders"


@pytest.fixture
def handled(monkeypatch):
    """Return what a group has handled; no other group reads the messages of this test."""
    monkeypatch.setattr(register, "registered", {})
    seen = []

    @register.consumer(Placed, group="core")
    def handle(message, context):
        seen.append(message.order)

    return seen


@pytest.fixture
def message():
    """A message that was published and waits."""
    with atomic():
        publish(Placed(order=1))
    return MessageRow.objects.get()


def told(*arguments):
    """Run a command; return its line of JSON, and its exit code."""
    printed, code = run(*arguments, "--json")
    return json.loads(printed), code


def relay():
    return run_once(RelayTarget("default", "default"), note="core", at_most=timedelta(seconds=20), idle_timeout=NO_IDLE_TIMEOUT)


class TestAMessage:
    def test_comes_to_its_consumer_once(self, outbox, handled):
        with atomic():
            publish(Placed(order=1))

        outbox.run_until_idle()

        assert handled == [1]
        assert Batch.objects.get().state == State.SENT
        assert Inbox.objects.get().consumer_group == "core"

    def test_is_committed_by_a_check_back_where_its_relay_died(self, outbox, handled):
        with atomic():
            publish(Placed(order=1))
        with outbox.crash("after_decide"):
            outbox.run_until_idle()

        answers = outbox.check_back()
        outbox.run_until_idle()

        assert (answers, handled) == (["COMMIT"], [1])
        assert CheckBack.objects.get().answer == "COMMIT"

    def test_goes_half_first(self, outbox, handled):
        with atomic(half_first=Placed(order=1)):
            pass

        outbox.run_until_idle()

        assert handled == [1]

    def test_has_a_timeline(self, message):
        relay()

        timeline = read_timeline("default", message.id)

        assert (timeline.state, timeline.entries[0].what) == ("sent", "Published")


class TestAPage:
    @pytest.mark.parametrize(
        "view",
        [
            f"outbox_{model._meta.model_name}_changelist"
            for model in apps.get_app_config("outbox").get_models()
            if admin.site.is_registered(model)
        ],
    )
    def test_opens(self, view, message, admin_client):
        page = admin_client.get(reverse(f"admin:{view}"))

        assert page.status_code == 200
        assert "Findings" not in page.text

    def test_of_a_message_opens(self, message, admin_client):
        relay()

        page = admin_client.get(reverse("admin:outbox_messagerow_change", args=[message.id]))

        assert page.status_code == 200
        assert "Published" in page.text

    def test_of_a_message_that_is_gone_leads_back(self, admin_client):
        assert admin_client.get(reverse("admin:outbox_messagerow_change", args=[message_id()])).status_code == 302


class TestTheStatus:
    def test_is_read(self, message):
        found, _ = told("outbox_status", "--database", "default")

        [database] = found["databases"]
        assert {topic["name"]: topic["waiting"] for topic in database["topics"]}["orders"] == 1
        assert (database["parked"], database["deferred"]) == ({}, [])

    def test_is_healthy_where_nothing_is_wrong(self):
        for broker in {topic.broker for topic in conf.settings().topics.values()}:
            heartbeats.beat(database.raw("default"), "relay", broker=broker)

        assert (readiness()["default"], health()["default"]) == (Health.OK, Health.OK)

    def test_is_scraped(self, message, client):
        page = client.get("/metrics/").content.decode()

        assert 'outbox_messages{database="default",state="waiting",topic="orders"} 1.0' in page

    def test_is_examined(self, only_the_shops_types):
        found, code = told("outbox_doctor")

        assert code < 2, found


class TestPrune:
    def test_drops_days_and_deletes_rows(self):
        with database.connect("default") as connection:
            partitions.create_partition(connection, LONG_AGO.date())
        MessageRowFactory(id=message_id(LONG_AGO))

        pruned = prune("default")

        assert pruned.days == [LONG_AGO.date()]
        assert "outbox_recorded" not in pruned.rows
