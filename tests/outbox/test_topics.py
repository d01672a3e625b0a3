from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier

import psycopg
import pytest
from django.db import InternalError, transaction

from outbox import database
from outbox.ids import topic_number
from outbox.models import Topic
from outbox.topics import forget, pause, resume, topic_id, write_topic, write_topics

pytestmark = pytest.mark.django_db

MEMORY = {"default": {"BACKEND": "outbox.brokers.memory.MemoryBroker"}}


@pytest.fixture(autouse=True)
def _two_topics(settings):
    settings.OUTBOX = {"BROKERS": MEMORY, "TOPICS": {"drawn": {"TYPE": "normal"}, "queued": {"TYPE": "fifo"}}}


class TestWriteTopics:
    def test_writes_what_settings_say(self):
        write_topics("default")

        rows = Topic.objects.filter(name__in=["drawn", "queued"]).order_by("name")
        written = list(rows.values_list("name", "broker", "type", "ordered"))
        assert written == [("drawn", "default", "normal", False), ("queued", "default", "fifo", True)]

    def test_corrects_a_row_that_says_otherwise(self, settings):
        write_topics("default")
        settings.OUTBOX = {"BROKERS": MEMORY, "TOPICS": {"drawn": {"TYPE": "fifo"}}}

        write_topics("default")

        drawn = Topic.objects.get(name="drawn")
        assert (drawn.type, drawn.ordered) == ("fifo", True)

    @pytest.mark.django_db(transaction=True)
    def test_writes_a_row_once_though_many_do_so_at_once(self):
        Topic.objects.all().delete()
        start = Barrier(4)

        def write(_):
            with database.connect("default") as own:
                start.wait(10)
                for name in ("drawn", "queued"):
                    write_topic(own, name)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, range(4)))

        assert set(Topic.objects.values_list("name", flat=True)) == {"drawn", "queued"}


class TestTopicId:
    def test_fails_with_djangos_error_in_a_broken_transaction(self):
        forget("default")

        with transaction.atomic():
            with suppress(psycopg.Error):
                database.raw("default").execute("SELECT 1 / 0")
            with pytest.raises(InternalError, match="transaction is aborted"):
                topic_id("drawn", "default")
            transaction.set_rollback(True)

    def test_is_that_of_the_row(self):
        write_topics("default")

        assert topic_id("drawn", "default") == Topic.objects.get(name="drawn").id


class TestPause:
    def test_says_who_paused_and_why(self):
        write_topics("default")

        done = pause(database.raw("default"), "drawn", by="ada", reason="the warehouse moves")

        topic = Topic.objects.get(name="drawn")
        assert done is True
        assert (topic.paused, topic.paused_by, topic.pause_reason) == (True, "ada", "the warehouse moves")
        assert topic.paused_at is not None

    def test_changes_nothing_where_another_was_faster(self):
        write_topics("default")
        pause(database.raw("default"), "drawn", by="ada", reason="the warehouse moves")

        done = pause(database.raw("default"), "drawn", by="bob", reason="lunch")

        assert done is False
        assert Topic.objects.get(name="drawn").paused_by == "ada"


class TestResume:
    def test_ends_the_pause_and_forgets_who_and_why(self):
        write_topics("default")
        pause(database.raw("default"), "drawn", by="ada", reason="the warehouse moves")

        done = resume(database.raw("default"), "drawn", since=Topic.objects.get(name="drawn").paused_at)

        topic = Topic.objects.get(name="drawn")
        assert done is True
        assert (topic.paused, topic.paused_at, topic.paused_by, topic.pause_reason) == (False, None, "", "")

    def test_leaves_a_pause_alone_that_another_has_begun_since(self):
        write_topics("default")
        pause(database.raw("default"), "drawn", by="ada", reason="the warehouse moves")
        seen = Topic.objects.get(name="drawn").paused_at
        resume(database.raw("default"), "drawn", since=seen)
        pause(database.raw("default"), "drawn", by="bob", reason="the database moves")

        done = resume(database.raw("default"), "drawn", since=seen)

        assert done is False
        assert Topic.objects.get(name="drawn").paused_by == "bob"

    def test_ends_a_pause_that_was_made_by_hand(self):
        write_topics("default")
        Topic.objects.filter(name="drawn").update(paused=True)

        assert resume(database.raw("default"), "drawn", since=None) is True

    def test_wakes_a_relay(self):
        write_topics("default")
        pause(database.raw("default"), "drawn", by="ada", reason="the warehouse moves")
        with database.connect("default") as relay:
            relay.execute("LISTEN outbox")
            relay.execute("INSERT INTO outbox_wakeup VALUES ('another', -1)")
            with database.connect("default") as own:
                own.execute(
                    "INSERT INTO outbox_topic (id, name, type, paused) VALUES (%s, 'woken', 'normal', true)",
                    [topic_number("woken")],
                )
                resume(own, "woken", since=None)
                own.execute("DELETE FROM outbox_topic WHERE name = 'woken'")
                own.execute("DELETE FROM outbox_wakeup WHERE relay = -1")

            assert list(relay.notifies(timeout=5, stop_after=1)) != []
