import pytest

from outbox.check_backs import ask
from outbox.check_backs.ask import make_signer
from outbox.models import CheckBack
from outbox.monitoring.doctor import check_endpoint
from tests.check_back_secrets import OTHER_SECRET, SECRET

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.fixture
def asked(settings, about, live_server):
    """Return the findings about the endpoint at a URL."""

    def asked(path="/outbox/check-back/", *, server=live_server.url, secrets=(SECRET,)):
        settings.OUTBOX = {**settings.OUTBOX, "CHECK_BACK": {"URL": f"{server}{path}", "SECRETS": list(secrets)}}
        return about(check_endpoint, "check-back endpoint")

    return asked


class TestEndpoint:
    def test_is_well_when_it_takes_our_signature(self, asked, live_server):
        assert asked() == [("ok", f"{live_server.url}/outbox/check-back/ accepts our signature")]
        assert not CheckBack.objects.exists()

    def test_is_named_when_it_does_not(self, asked, monkeypatch):
        monkeypatch.setattr(ask, "make_signer", lambda secret: make_signer(OTHER_SECRET))

        ((level, text),) = asked()

        assert level == "error"
        assert text.endswith("answered 401 Unauthorized")

    def test_is_named_when_another_program_answers(self, asked, monkeypatch):
        monkeypatch.setattr("outbox.api.views.answer_probe", lambda *_: {"signature": "v1,bm90IG91cnM="})

        ((level, _),) = asked()

        assert level == "error"

    def test_is_named_when_it_is_elsewhere(self, asked):
        ((level, text),) = asked("/nowhere/")

        assert level == "error"
        assert text.endswith("answered 404 Not Found")

    def test_is_named_when_it_refuses_our_host(self, asked, settings):
        settings.ALLOWED_HOSTS = ["shop.example"]

        ((level, text),) = asked()

        assert level == "error"
        assert text.endswith("answered 400 Bad Request")

    def test_is_named_when_it_cannot_be_reached(self, asked):
        ((level, text),) = asked(server="http://127.0.0.1:1")

        assert level == "error"
        assert "cannot be reached" in text

    def test_is_not_looked_for_without_an_address(self, about):
        assert about(check_endpoint, "check-back endpoint") == []
