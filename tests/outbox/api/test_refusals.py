import logging

import pytest
from django.core import mail
from django.test import Client
from django.urls import reverse

from outbox.models import State
from tests.factories import BatchFactory, TopicFactory

CHECK_BACK, WELL = reverse("outbox:check-back"), reverse("outbox:health-outbox")
UNSIGNED = {"webhook-id": "msg_1", "webhook-timestamp": "1", "webhook-signature": "v1,x"}


def lines(caplog):
    return [f"{one.levelname} {one.getMessage()}" for one in caplog.records if one.name.startswith(("outbox", "django"))]


@pytest.mark.django_db
class TestTheLogOfWhatWasRefused:
    def test_has_one_line_for_many_unsigned_requests(self, caplog):
        for _ in range(100):
            Client().post(CHECK_BACK, b"{}", content_type="application/json")

        (line,) = lines(caplog)
        assert line.startswith(f"WARNING {CHECK_BACK} answers 401 to 127.0.0.1: The request is not signed")

    def test_has_one_line_for_each_cause(self, caplog, post):
        for _ in range(10):
            Client().post(CHECK_BACK, b"{}", content_type="application/json")
            Client().post(CHECK_BACK, b"{}", content_type="application/json", headers=UNSIGNED)
            post({}, **{"webhook-signature": "v1,bm8="})
            post({})
            Client().post(CHECK_BACK + "?format=xml")
            Client().put(CHECK_BACK)

        assert [line.partition(" to 127.0.0.1: ")[2][:30] for line in lines(caplog)] == [
            "The request is not signed: it ",
            "The webhook-timestamp differs ",
            "The signature does not match a",
            '{"topic": ["This field is requ',
            "Not found.",
        ]

    def test_says_what_the_settings_lack_and_sends_no_mail_for_it(self, caplog, settings):
        settings.OUTBOX = {"CHECK_BACK": {"SECRETS": []}}
        settings.ADMINS = [("Ann", "ann@shop.example")]
        settings.DEBUG = False

        for _ in range(10):
            Client().post(CHECK_BACK, b"{}", content_type="application/json")

        assert [line[:70] for line in lines(caplog)] == [
            'ERROR A check-back was rejected, because OUTBOX["CHECK_BACK"]["SECRETS"]'[:70],
            f"WARNING {CHECK_BACK} answers 503 to 127.0.0.1: This endpoint is not configured"[:70],
        ]
        assert mail.outbox == []

    def test_cannot_be_forged(self, caplog):
        odd = "application/x\nWARNING all is well"

        with caplog.at_level(logging.INFO):
            Client().post(CHECK_BACK, b"{}", content_type=odd, headers={**UNSIGNED, "webhook-id": "a\nb"})

        assert all("\n" not in line for line in lines(caplog))


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
class TestTheLogOfBadHealth:
    def test_has_one_line_for_many_who_ask(self, caplog):
        BatchFactory(topic=TopicFactory(name="parcels"), state=State.DEAD)

        for _ in range(20):
            Client().get(WELL)

        (line,) = lines(caplog)
        assert "answers 503" in line
        assert '"default": "needs attention", "other": "ok"' in line
