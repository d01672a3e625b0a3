import re
import types
from base64 import b64encode

import pytest
from django.db import connections, transaction
from django.urls import clear_url_caches, include, path

from outbox import check_back
from outbox.api.views import CheckBackView
from outbox.brokers.capabilities import NeedsCheckLoop
from outbox.brokers.memory import MemoryBroker
from outbox.check_backs import UNKNOWN
from tests.check_back_secrets import SECRET
from tests.outbox.checks.conftest import BROKERS

URL = "https://shop.example/outbox/check-back/"


class BrokerThatAsksOverHTTP(MemoryBroker):
    lacks = (NeedsCheckLoop,)


OVER_HTTP = {"default": {"BACKEND": f"{__name__}.BrokerThatAsksOverHTTP"}}


class OwnView(CheckBackView):
    pass


@pytest.fixture
def addresses(settings):
    """Return a function that sets other urlpatterns for the project."""

    def addresses(*patterns):
        settings.ROOT_URLCONF = types.ModuleType("addresses")
        settings.ROOT_URLCONF.urlpatterns = list(patterns)
        clear_url_caches()

    yield addresses
    clear_url_caches()


class TestE010:
    def test_finds_a_rate_that_cannot_be_read(self, settings, found):
        settings.OUTBOX = {"BROKERS": BROKERS, "CHECK_BACK": {"THROTTLE": "many"}}

        (problem,) = found()

        assert problem.id == "outbox.E010"
        assert problem.msg.endswith("[\"THROTTLE\"] is 'many'.")
        assert problem.hint.startswith("Write a number and a time")


class TestE011:
    def test_finds_a_secret_that_is_none_and_does_not_show_it(self, settings, found):
        settings.OUTBOX = {"BROKERS": BROKERS, "CHECK_BACK": {"URL": URL, "SECRETS": [SECRET, "whsec_tells"]}}

        (problem,) = found()

        assert problem.id == "outbox.E011"
        assert '["SECRETS"], number 2: A secret is not base64' in problem.msg
        assert "tell" not in f"{problem.msg}{problem.hint}"

    @pytest.mark.parametrize("length", [1, 31])
    def test_finds_a_secret_that_is_too_short(self, settings, found, length):
        short = f"whsec_{b64encode(b'x' * length).decode()}"
        settings.OUTBOX = {"BROKERS": BROKERS, "CHECK_BACK": {"URL": URL, "SECRETS": [SECRET, short]}}

        (problem,) = found()

        assert problem.id == "outbox.E011"
        assert f"number 2: A secret has {length} bytes; at least 32 are required" in problem.msg

    def test_takes_a_secret_of_32_bytes(self, settings, found):
        settings.OUTBOX = {"BROKERS": BROKERS, "CHECK_BACK": {"SECRETS": [f"whsec_{b64encode(bytes(32)).decode()}"]}}

        assert found() == []


class TestE012:
    @pytest.mark.parametrize(
        ("check_back", "text"),
        [
            ({"URL": URL}, r"\[\"SECRETS\"\] is empty"),
            ({"URL": "shop.example", "SECRETS": [SECRET]}, "does not begin with http:// or https://"),
        ],
    )
    def test_finds_a_url_that_cannot_be_asked(self, settings, found, check_back, text):
        settings.OUTBOX = {"BROKERS": BROKERS, "CHECK_BACK": check_back}

        (problem,) = found()

        assert problem.id == "outbox.E012"
        assert re.search(text, problem.msg)
        assert problem.hint

    def test_leaves_one_alone_that_can(self, settings, found):
        settings.OUTBOX = {"BROKERS": BROKERS, "CHECK_BACK": {"URL": URL, "SECRETS": [SECRET]}}

        assert found() == []


class TestW026:
    @pytest.mark.parametrize("topic", ["nowhere", "bills"])
    def test_warns_of_a_function_for_a_topic_that_nobody_asks_about(self, settings, found, topic):
        settings.OUTBOX = {"BROKERS": BROKERS, "TOPICS": {"orders": {"TYPE": "transaction"}, "bills": {"TYPE": "normal"}}}

        @check_back("orders")
        def did_it_commit(half):
            return UNKNOWN

        check_back(topic)(did_it_commit)

        (problem,) = found()
        assert problem.id == "outbox.W026"
        assert problem.msg.startswith(f"@check_back({topic!r}) is {__name__}.")
        assert problem.hint == "Topics of type transaction are: orders."


class TestE027:
    def test_finds_a_topic_whose_check_backs_nobody_answers(self, settings, found, addresses):
        settings.OUTBOX = {"BROKERS": OVER_HTTP, "TOPICS": {"orders": {"TYPE": "transaction"}, "bills": {"TYPE": "normal"}}}
        addresses()

        (problem,) = found()

        assert problem.id == "outbox.E027"
        assert problem.msg.startswith('OUTBOX["TOPICS"]["orders"] is of type transaction, but check-backs of its broker')
        assert "outbox.api.urls" in problem.hint

    @pytest.mark.parametrize(("brokers", "has_endpoint"), [(OVER_HTTP, True), (BROKERS, False)])
    def test_is_quiet_where_somebody_does(self, settings, found, addresses, brokers, has_endpoint):
        settings.OUTBOX = {"BROKERS": brokers, "TOPICS": {"orders": {"TYPE": "transaction"}}}
        addresses(*[path("outbox/", include("outbox.api.urls"))] * has_endpoint)

        assert found() == []


class TestW054:
    @pytest.fixture(autouse=True)
    def _url(self, settings):
        check_back = {"URL": "https://shop.example/outbox/check-back/", "SECRETS": [SECRET]}
        settings.OUTBOX = {"BROKERS": BROKERS, "CHECK_BACK": check_back}

    def test_finds_an_address_that_this_project_does_not_serve(self, found, addresses):
        addresses()

        (problem,) = found()

        assert problem.id == "outbox.W054"
        assert "'https://shop.example/outbox/check-back/'" in problem.msg
        assert "outbox.api.urls" in problem.hint

    def test_is_quiet_where_the_project_serves_the_endpoint(self, found, addresses):
        addresses(path("outbox/", include("outbox.api.urls")))

        assert found() == []


class TestE028:
    @pytest.fixture(autouse=True)
    def _atomic_requests(self, settings, monkeypatch):
        settings.OUTBOX = {"BROKERS": BROKERS}
        monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)

    @pytest.mark.parametrize("view", [CheckBackView, OwnView])
    def test_finds_an_endpoint_in_a_transaction(self, found, addresses, view):
        addresses(path("deep/", include([path("check-back/", view.as_view())])))

        (problem,) = found()

        assert problem.id == "outbox.E028"
        assert problem.msg == "The check-back endpoint runs in a transaction of 'default', because of ATOMIC_REQUESTS."
        assert "outbox.api.urls" in problem.hint

    def test_is_quiet_about_ours(self, found, addresses):
        addresses(path("outbox/", include("outbox.api.urls")))

        assert found() == []

    def test_is_quiet_about_one_that_is_kept_out(self, found, addresses):
        view = transaction.non_atomic_requests(using="default")(OwnView.as_view())
        addresses(path("check-back/", view))

        assert found() == []


class TestW029:
    @pytest.mark.parametrize(
        ("check_back", "is_deployed", "ids"),
        [({}, True, ["outbox.W029"]), ({"SECRETS": [SECRET]}, True, []), ({}, False, [])],
    )
    def test_warns_of_an_endpoint_without_secret(self, settings, found, addresses, check_back, is_deployed, ids):
        settings.OUTBOX = {"BROKERS": BROKERS, "CHECK_BACK": check_back}
        addresses(path("outbox/", include("outbox.api.urls")))

        problems = found(include_deployment_checks=is_deployed)

        assert [problem.id for problem in problems] == ids
        assert all("openssl" in problem.hint for problem in problems)

    def test_is_quiet_where_there_is_no_endpoint(self, settings, found, addresses):
        settings.OUTBOX = {"BROKERS": BROKERS}
        addresses()

        assert found(include_deployment_checks=True) == []
