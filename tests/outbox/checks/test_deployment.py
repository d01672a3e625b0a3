import pytest

from outbox.failpoints import VARIABLE
from tests.check_back_secrets import SECRET
from tests.outbox.checks.conftest import BROKERS


@pytest.fixture
def deployed(found):
    """The problems found with --deploy, and not without it."""

    def deployed():
        assert found() == []
        return found(include_deployment_checks=True)

    return deployed


class TestE032:
    def test_finds_topics_on_the_memory_broker(self, settings, deployed):
        settings.OUTBOX = {"BROKERS": BROKERS, "TOPICS": {"orders": {}}, "CHECK_BACK": {"SECRETS": [SECRET]}}

        (problem,) = deployed()

        assert problem.id == "outbox.E032"
        assert problem.msg == "Broker 'default' keeps its messages in the memory of one process."
        assert problem.hint


class TestW033:
    def test_warns_of_failpoints(self, settings, deployed, monkeypatch):
        settings.OUTBOX = {"CHECK_BACK": {"SECRETS": [SECRET]}}
        monkeypatch.setenv(VARIABLE, "relay.after_claim:kill")

        (problem,) = deployed()

        assert problem.id == "outbox.W033"
        assert problem.msg.startswith("OUTBOX_FAILPOINTS is set")
        assert problem.hint
