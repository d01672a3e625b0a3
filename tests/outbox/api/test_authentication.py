from base64 import b64encode
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from outbox.message import Half
from outbox.models import CheckBack
from tests.check_back_secrets import OTHER_SECRET, SECRET
from tests.outbox.api.questions import question_of

QUESTION = question_of(Half("orders", f"of another producer: {uuid4()}", "h"))


@pytest.mark.django_db(transaction=True)
class TestSignedRequest:
    def test_lets_a_signed_request_in(self, post):
        assert post(QUESTION).status_code == 200

    @pytest.mark.parametrize("secret", [SECRET, OTHER_SECRET])
    def test_takes_each_of_the_secrets(self, post, settings, secret):
        settings.OUTBOX = {"CHECK_BACK": {"SECRETS": [OTHER_SECRET, SECRET]}}

        assert post(QUESTION, secret=secret).status_code == 200


@pytest.mark.django_db  # nothing is committed: nobody is answered
class TestARefusedRequest:
    def test_lacks_a_signature(self, client):
        response = client.post("/outbox/check-back/", QUESTION, content_type="application/json")

        assert_refused(response, "not signed")

    @pytest.mark.parametrize("header", ["webhook-id", "webhook-timestamp", "webhook-signature"])
    def test_lacks_a_header(self, post, header):
        assert_refused(post(QUESTION, **{header: ""}), header)

    @pytest.mark.parametrize("signature", ["v1,bm90IHRoaXM=", "v1", "v1,", "v1,not base64", "v2,x", "v1a,", ",", " ", "v1,é"])
    def test_has_a_signature_that_fits_not(self, post, signature):
        assert_refused(post(QUESTION, **{"webhook-signature": signature}), "signature")

    def test_is_signed_with_another_secret(self, post):
        assert_refused(post(QUESTION, secret=OTHER_SECRET), "signature")

    def test_is_signed_for_another_id(self, post):
        assert_refused(post(QUESTION, **{"webhook-id": "another"}), "signature")

    def test_is_signed_for_another_time(self, post):
        soon = str(int(datetime.now(UTC).timestamp()) + 30)

        assert_refused(post(QUESTION, **{"webhook-timestamp": soon}), "signature")

    @pytest.mark.parametrize("difference", [timedelta(seconds=-330), timedelta(seconds=330)])
    def test_is_older_or_newer_than_the_tolerance(self, post, difference):
        assert_refused(post(QUESTION, at=datetime.now(UTC) + difference), "more than 300 s")

    @pytest.mark.parametrize("timestamp", ["today", "nan", "inf", "1e400", "9" * 400])
    def test_has_a_time_that_is_none(self, post, timestamp):
        assert_refused(post(QUESTION, **{"webhook-timestamp": timestamp}), "webhook-timestamp")

    def test_has_an_id_too_long_to_be_kept(self, post):
        assert_refused(post(QUESTION, request_id="x" * 256), "webhook-id")

    @pytest.mark.parametrize("request_id", ["a\x00b", "a\nb", "é", "a\x7fb"])
    def test_has_an_id_that_is_not_printable(self, post, request_id):
        assert_refused(post(QUESTION, request_id=request_id), "webhook-id")

    def test_has_a_body_too_large_to_be_looked_into(self, post):
        response = post(body=b"x" * (64 * 1024 + 1), secret=OTHER_SECRET)

        assert response.status_code == 413

    @pytest.mark.parametrize("secrets", [[], ["whsec_"], [SECRET, "whsec_a"], [SECRET, "whsec_" + b64encode(bytes(31)).decode()]])
    def test_is_each_one_where_the_secrets_are_not_set_up(self, post, settings, secrets, caplog):
        settings.OUTBOX = {"CHECK_BACK": {"SECRETS": secrets}}

        response = post(QUESTION)

        assert response.status_code == 503
        assert "SECRETS" in caplog.text
        assert "SECRETS" not in response.text
        assert not CheckBack.objects.filter(message_id=QUESTION["message_id"]).exists()

    def test_hears_what_kind_of_signature_is_asked_for(self, client):
        response = client.post("/outbox/check-back/", QUESTION, content_type="application/json")

        assert response.headers["www-authenticate"] == "Standard-Webhooks"


def assert_refused(response, words):
    """A clear reason, nothing about the message, and no answer on record."""
    assert response.status_code == 401
    assert words in response.json()["detail"]
    assert response.json().keys() == {"detail"}
    assert not CheckBack.objects.filter(message_id=QUESTION["message_id"]).exists()
