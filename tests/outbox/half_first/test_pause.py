"""Half first to a topic that an operator has paused."""

import pytest
from django.contrib.auth.models import Group
from django.db import connections, transaction
from django.urls import reverse

import outbox
from outbox.brokers.base import SendStatus
from outbox.errors import NotOutermost
from outbox.message import COMMIT
from outbox.models import Batch, MessageRow, State, Ticket, Topic
from outbox.topics import pause, write_topics
from tests.outbox.half_first.orders import GroupMade, announce, ask, committed_half, make_group, shown, stored_half


class Broken(Exception):
    """Raised by work that is told to."""


@pytest.fixture
def switch(_half_first, operator):
    """Pause or resume the topic as an operator does, in the admin."""
    write_topics("default")
    client = operator("view_topic", "pause_topic")

    def switch(verb):
        topic = Topic.objects.get(name="orders")
        since = topic.paused_at.isoformat() if topic.paused_at else ""
        page = client.post(reverse(f"admin:outbox_topic_{verb}", args=[topic.pk]), {"reason": "x", "since": since})
        assert page.status_code == 302
        assert Topic.objects.get(name="orders").paused is (verb == "pause")

    return switch


class TestWhileATopicIsPaused:
    def test_the_work_is_done_and_the_message_waits(self, broker, relay, switch):
        switch("pause")

        group = make_group()
        relay.drain()

        assert Group.objects.get() == group
        assert shown(broker) == []
        assert stored_half() is None
        assert Batch.objects.count() == 0
        assert [ticket.message_id for ticket in Ticket.objects.all()] == [MessageRow.objects.get().id]

    def test_the_message_goes_after_the_resume(self, broker, relay, switch):
        switch("pause")
        make_group()

        switch("resume")
        relay.drain()

        assert shown(broker) == [str(MessageRow.objects.get().id)]
        batch = Batch.objects.get()
        assert (batch.state, batch.lane) == (State.SENT, 1)

    def test_it_is_announced_with_the_row_that_it_is_about(self, switch):
        switch("pause")

        group = make_group()

        assert MessageRow.objects.get().about == f"auth.group:{group.pk}"

    def test_the_broker_is_not_asked_for_anything(self, settings, monkeypatch, switch):
        switch("pause")
        monkeypatch.setitem(connections.settings, "away", {**connections.settings["default"], "HOST": "127.0.0.1", "PORT": "1"})
        brokers = {"default": {"OPTIONS": {"DATABASE": "away"}}}
        settings.OUTBOX = {"BROKERS": brokers, "TOPICS": {"orders": {"TYPE": "transaction"}}}

        assert make_group().pk

    def test_work_that_fails_takes_its_message_along(self, switch):
        switch("pause")

        @outbox.transactional(half_first=announce)
        def work(message):
            Group.objects.create(pk=message.group_id)
            raise Broken

        with pytest.raises(Broken):
            work()

        assert Group.objects.count() == MessageRow.objects.count() == Ticket.objects.count() == 0

    def test_it_is_refused_inside_a_transaction_as_ever(self, switch):
        switch("pause")

        with transaction.atomic(), pytest.raises(NotOutermost):
            make_group()

    def test_a_wakeup_is_sent_for_what_a_resume_may_have_missed(self, settings, switch, monkeypatch):
        switch("pause")
        settings.OUTBOX = {**settings.OUTBOX, "CELERY_WAKEUP": True}
        heard = []
        monkeypatch.setattr("outbox.publishing.wakeup.sender.add", heard.append)

        make_group()

        assert heard == [("default", "default")]


class TestWhatWasUnderWayWhenItsTopicWasPaused:
    @pytest.fixture
    def pause_now(self, other_connection, settings):
        write_topics("default")
        return lambda: pause(other_connection, "orders", by="ada", reason="x")

    def test_is_committed_by_its_process(self, broker, pause_now):
        with outbox.atomic(half_first=GroupMade(group_id=1)):
            assert pause_now()

        assert len(shown(broker)) == 1

    def test_is_committed_by_the_check_back(self, memory, pause_now):
        memory.fail("end", SendStatus.UNSURE)
        make_group()
        [half] = memory.halves()

        assert pause_now()

        assert half.ended is None
        assert ask(committed_half()) is COMMIT

    def test_is_committed_by_the_sweep(self, broker, relay, pause_now, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(type(broker), "end", lambda *args, **options: 1 / 0)
            make_group()
        hidden = shown(broker)

        assert pause_now()
        relay.sweep()

        assert (hidden, len(shown(broker))) == ([], 1)
        assert Batch.objects.get().state == State.SENT
