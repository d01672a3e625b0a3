"""Histories that were broken: each time a finding that names the thing, never a traceback and never a false green."""

import re
from datetime import timedelta
from uuid import UUID

import pytest

from outbox.pipeline.quick_check.check import quick_check
from outbox.pipeline.quick_check.window import NOTHING
from tests.outbox.pipeline.quick_check.broken import BROKEN, installed_long_ago, play, run

OF_VERSION_4 = UUID("f0000000-0000-4000-8000-000000000001")

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _no_business_rows(settings):
    settings.OUTBOX = {**settings.OUTBOX, "PIPELINE": {"AUDIT": {}}}


def checked(**options):
    return quick_check("default", **{"length": timedelta(hours=1), "settle": timedelta(0), **options})


class TestAQuickCheckOfABrokenHistory:
    @pytest.mark.parametrize("what", BROKEN)
    def test_names_what_is_broken(self, what):
        play()
        assert checked().findings == []
        statements, finding = BROKEN[what]

        for statement in statements:
            run(statement)
        said = [str(one) for one in checked().findings]

        assert [one for one in said if re.match(finding, one)], said

    def test_is_told_that_nothing_was_proved_where_nothing_is_left(self):
        play()
        for statement in BROKEN["everything gone but the lanes"][0]:
            run(statement)

        with installed_long_ago():
            assert NOTHING in checked().notes

    def test_judges_messages_whose_ids_name_no_time(self):
        ids = play()
        for table, column, kind in (
            ("outbox_message", "id", "uuid"),
            ("outbox_inbox", "message_id", "uuid"),
            ("outbox_embedded_message", "message_id", "text"),
        ):
            run(f"UPDATE {table} SET {column} = %s::{kind} WHERE {column} = %s::{kind}", [str(OF_VERSION_4), str(ids[1])])
        run("UPDATE outbox_batch SET message_ids = array_replace(message_ids, %s, %s)", [ids[1], OF_VERSION_4])
        run("DELETE FROM outbox_inbox WHERE consumer_group = 'cart' AND number = 2")

        assert [(str(one.kind), one.group, one.ids) for one in checked().findings] == [("lost", "cart", (str(OF_VERSION_4),))]
