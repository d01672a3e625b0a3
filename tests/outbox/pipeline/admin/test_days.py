from datetime import date, timedelta

import pytest
from django.urls import reverse
from django.utils import timezone

from outbox.pipeline.models import ArchivedDay

LIST = "admin:outbox_pipeline_archivedday_changelist"
STATES = ["planned", "committed", "changed", "deleted"]
FIRST = date(2026, 11, 1)

pytestmark = pytest.mark.django_db


@pytest.fixture
def days():
    """Days, each a step further than the one before."""
    at = {"planned_at": timezone.now(), "committed_at": timezone.now()}
    return [
        ArchivedDay.objects.create(day=FIRST + timedelta(n), state=state, attempt=n + 1, rows=4700 + n, **at)
        for n, state in enumerate(STATES)
    ]


class TestArchivedDays:
    def test_are_listed_with_what_became_of_them_newest_first(self, days, admin_client):
        page = admin_client.get(reverse(LIST))

        assert list(page.context["cl"].result_list) == days[::-1]
        for said in ("being written", "in lake and database", "to be archived again", "only in the lake", "4703"):
            assert said in page.text

    def test_are_found_by_their_state(self, days, admin_client):
        page = admin_client.get(reverse(LIST), {"state": "changed"})

        assert list(page.context["cl"].result_list) == [days[2]]

    def test_are_read_along_their_key_and_without_the_names_of_their_files(self, days, admin_client, asked):
        page = admin_client.get(reverse(LIST), {"before": "2026-11-03"})

        assert list(page.context["cl"].result_list) == days[1::-1]
        counted, listed = [query for query, _ in asked if 'FROM "outbox_archived_day"' in str(query)]
        assert "LIMIT" in counted
        assert '"day" < %s ORDER BY "outbox_archived_day"."day" DESC' in listed
        assert "manifest" not in counted + listed

    def test_are_for_those_who_may_view_them(self, days, operator):
        assert operator("view_archivedday").get(reverse(LIST)).status_code == 200
        assert operator("view_topic", name="bob").get(reverse(LIST)).status_code == 403

    def test_are_changed_by_nobody(self, days, admin_client):
        assert "outbox_pipeline/archivedday/add/" not in admin_client.get(reverse(LIST)).text
        assert admin_client.get(f"/admin/outbox_pipeline/archivedday/{FIRST}/change/").status_code == 404
