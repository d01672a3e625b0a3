import pytest
from django.urls import reverse
from django.utils import timezone

from outbox.pipeline.models import MonitorLane

LIST = "admin:outbox_pipeline_monitorlane_changelist"

pytestmark = pytest.mark.django_db


@pytest.fixture
def lanes():
    of = {"source": "us", "topic": "orders", "seen": 9, "highest": 12}
    MonitorLane.objects.create(**of, consumer_group="", lane=1, missing=0)
    MonitorLane.objects.create(
        **of, consumer_group="cart", lane=1, missing=3, first_missing=7, first_missing_since=timezone.now()
    )
    MonitorLane.objects.create(**of, consumer_group="some-tags", lane=-1, missing=None)


class TestTheMonitor:
    def test_shows_what_is_missing_to_whom(self, lanes, admin_client):
        page = admin_client.get(reverse(LIST)).content.decode()

        for said in ("(outbox)", "cart", "some-tags", "none", "3, first 7", "not judged"):
            assert said in page

    def test_is_for_those_who_may_view_it(self, lanes, operator):
        assert operator("view_monitorlane").get(reverse(LIST)).status_code == 200
        assert operator("view_topic", name="bob").get(reverse(LIST)).status_code == 403

    def test_takes_no_row_by_hand(self, lanes, admin_client):
        page = admin_client.get(reverse(LIST))

        assert "outbox_pipeline/monitorlane/add/" not in page.content.decode()
