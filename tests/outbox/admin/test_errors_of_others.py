"""Texts of errors may quote a message: the overview shows them to those who may view messages."""

from uuid import uuid4

import pytest
from django.urls import reverse

from outbox.models import FailedDelivery, FailedSend, State
from tests.factories import BatchFactory, MessageRowFactory

pytestmark = pytest.mark.django_db

OVERVIEW = reverse("admin:outbox_overview_changelist")
OTHERS = [
    "view_deadmessage",
    "view_deferred",
    "view_checkback",
    "view_inbox",
    "view_embeddedhalf",
    "view_auditrun",
    "pause_topic",
]


@pytest.fixture(autouse=True)
def _errors(orders):
    """A delivery that failed, and a batch that the broker is not set up for, each with the address of a customer in its error."""
    about = {
        "consumer_group": "cart",
        "topic": "orders",
        "delivery_count": 1,
        "outcome": "dead letter",
        "traceback": "",
        "source": "",
    }
    FailedDelivery.objects.create(message_id=uuid4(), fingerprint="ValueError: 1 Secret Street", error="", **about)
    batch = BatchFactory(topic=orders, state=State.RELEASED, attempt=2, last_error="No: 2 Secret Street.")
    FailedSend.objects.create(batch_id=batch.id, message_ids=[MessageRowFactory().id], attempt=2, verdict="misconfigured")


class TestTheOverview:
    def test_shows_the_texts_of_errors_to_whoever_may_view_messages(self, operator):
        page = operator("view_topic", "view_messagerow").get(OVERVIEW).text

        assert "1 Secret Street" in page
        assert "2 Secret Street" in page

    def test_shows_what_is_wrong_without_them_to_whoever_may_view_topics(self, operator):
        page = operator("view_topic").get(OVERVIEW).text

        assert "Deliveries that failed in the last hour" in page
        assert "The topic is not configured correctly at the broker." in page
        assert "Secret" not in page

    @pytest.mark.parametrize("permission", OTHERS)
    def test_shows_none_for_another_permission(self, operator, permission):
        assert "Secret" not in operator("view_topic", permission).get(OVERVIEW).text
