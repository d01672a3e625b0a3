"""Days with rows that no release of the outbox writes: archived as they are, or kept with a reason that names them."""

import pytest
from django.db import connection

from tests.outbox.pipeline.spark.archive.conftest import FIRST, PER_DAY, SECOND
from tests.outbox.pipeline.spark.archive.looks import in_database, in_lake


def run(statement, *arguments):
    with connection.cursor() as cursor:
        cursor.execute(statement, arguments)


class TestADayWithBrokenRows:
    @pytest.mark.parametrize(
        "statement",
        [
            "DELETE FROM outbox_topic WHERE name = 'orders'",
            "UPDATE outbox_batch SET lane = NULL",
            "UPDATE outbox_batch SET first_seq = NULL",
            "UPDATE outbox_message SET headers = 'not JSON' WHERE topic_id <> 0",
            "UPDATE outbox_batch SET half_ids = ARRAY['a', 'b', 'c', 'd', 'e', 'f', 'g']",
            "UPDATE outbox_inbox SET number = -7",
            "UPDATE outbox_message SET created_at = '2999-01-01' WHERE topic_id <> 0",
        ],
    )
    def test_is_archived_as_it_is(self, archive, lake, ids, statement):
        run(statement)

        assert archive(before=SECOND).days == {str(FIRST): PER_DAY}
        assert in_lake(lake) == ids[:PER_DAY]

    @pytest.mark.parametrize(
        ("statement", "column"),
        [
            ("UPDATE outbox_message SET created_at = 'infinity' WHERE id = %s", "created_at"),
            ("UPDATE outbox_message SET created_at = '20000-01-01' WHERE id = %s", "created_at"),
            ("UPDATE outbox_batch SET sent_at = '-infinity' WHERE %s = ANY(message_ids)", "sent_at"),
            ("UPDATE outbox_inbox SET handled_at = '-infinity' WHERE message_id = %s", "handled_at"),
            ("UPDATE outbox_batch SET first_seq = 9223372036854775807 WHERE %s = ANY(message_ids)", "first number"),
        ],
    )
    def test_is_kept_where_a_value_cannot_be_archived_and_the_others_go(self, archive, ids, statement, column):
        run(statement, ids[0])

        done = archive()

        assert ids[0] in done.kept[str(FIRST)]
        assert column in done.kept[str(FIRST)]
        assert set(ids[:PER_DAY]) <= set(in_database())
