from contextlib import suppress

import psycopg
import pytest
from django.db import InternalError, transaction

from outbox import database
from outbox.models import Topic
from outbox.topics import forget, topic_id, write_topics

pytestmark = pytest.mark.django_db

MEMORY = {"default": {"BACKEND": "outbox.brokers.memory.MemoryBroker"}}


@pytest.fixture(autouse=True)
def _two_topics(settings):
    settings.OUTBOX = {"BROKERS": MEMORY, "TOPICS": {"drawn": {"TYPE": "normal"}, "queued": {"TYPE": "fifo"}}}


def numbers_taken():
    return database.raw("default").execute("SELECT pg_sequence_last_value('outbox_topic_id_seq')").fetchone()[0]


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

    def test_takes_no_number_for_rows_that_are_there(self):
        write_topics("default")
        before = numbers_taken()

        write_topics("default")

        assert numbers_taken() == before


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
