import pytest
from django.db import connections

from outbox import consumer
from outbox.brokers.memory import MemoryBroker
from outbox.checks.deployment import check_running_brokers
from outbox.failpoints import VARIABLE
from outbox.findings import weak
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


class DurableBroker(MemoryBroker):
    is_durable = True


class WeakBroker(DurableBroker):
    def check(self):
        return [weak("The server forgets at night.", "Let it sleep less.")]


@pytest.fixture
def strange_database(request, monkeypatch, django_db_blocker):
    """An alias with the given settings in DATABASES, or without any; it may be connected to."""
    if request.param:
        monkeypatch.setitem(connections.settings, "strange", {**connections.settings["default"], **request.param, "OPTIONS": {}})
    with django_db_blocker.unblock():
        yield "strange"
        if hasattr(connections._connections, "strange"):
            connections["strange"].close()
            del connections["strange"]


class TestRunningBrokers:
    @pytest.fixture
    def asked(self, settings, found):
        """The problems found with --deploy and --database, and not without --database."""

        def asked(backend, **options):
            broker = {"BACKEND": backend, "OPTIONS": options}
            settings.OUTBOX = {"BROKERS": {"default": broker}, "TOPICS": {"orders": {}}, "CHECK_BACK": {"SECRETS": [SECRET]}}
            assert found(include_deployment_checks=True) == []
            return found(include_deployment_checks=True, databases=["default"])

        return asked

    @pytest.mark.django_db
    def test_tells_what_the_running_broker_lacks(self, asked):
        (problem,) = asked(f"{__name__}.WeakBroker")

        assert (problem.id, problem.hint) == ("outbox.broker_weak", "Let it sleep less.")
        assert (problem.obj, problem.msg) == ("broker 'default'", "The server forgets at night.")

    @pytest.mark.django_db
    def test_tells_that_a_broker_cannot_be_reached(self, asked):
        (problem,) = asked("outbox.brokers.rabbitmq.RabbitMQBroker", NODES=["127.0.0.1:1"])

        assert (problem.id, problem.obj) == ("outbox.broker_away", "broker 'default'")
        assert problem.text.startswith("It cannot be reached. No node of RabbitMQ could be connected to")
        assert 'OUTBOX["BROKERS"]["default"]' in problem.hint

    @pytest.mark.parametrize(
        "strange_database",
        [{"ENGINE": "django.db.backends.dummy"}, {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}, None],
        ids=["DATABASES = {}", "SQLite", "an alias that is not there"],
        indirect=True,
    )
    def test_leaves_groups_out_whose_database_has_no_outbox(self, strange_database, settings):
        settings.OUTBOX = {"BROKERS": {"default": {"BACKEND": f"{__name__}.WeakBroker"}}, "TOPICS": {"orders": {}}}

        @consumer(topic="orders", group="billing", using=strange_database)
        def note(message, context):
            pass

        (problem,) = check_running_brokers(databases=[strange_database])

        assert (problem.obj, problem.msg) == ("broker 'default'", "The server forgets at night.")

    @pytest.mark.django_db
    def test_has_nothing_to_say_of_a_broker_that_is_well(self, asked):
        assert asked(f"{__name__}.DurableBroker") == []
