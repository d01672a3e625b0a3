import re

import pytest
from django.core.checks import Error
from django.core.checks import Warning as Caution

from outbox.brokers.memory import MemoryBroker
from outbox.findings import Finding, risky_option, wrong_option
from outbox.message import Message
from tests.outbox.checks.conftest import BROKERS, ONE_PHASE


class FussyBroker(MemoryBroker):
    @classmethod
    def check_settings(cls, options, topics=()):
        return [
            wrong_option("COLOUR is no option.", "Take it out."),
            risky_option("SPEED is low.", "Raise it."),
        ]


class BrokerWithoutPorts(MemoryBroker):
    @classmethod
    def check_settings(cls, options, topics=()):
        return [wrong_option(f"Topic {topic.name} needs PORTS.", "Give them.") for topic in topics if topic.type == "transaction"]


class TestE001:
    @pytest.mark.parametrize(
        ("outbox", "text"),
        [
            ({"TOPIKS": {}}, "OUTBOX has an unknown setting 'TOPIKS'.*Did you mean TOPICS?"),
            ({"CELERY_WAKEUP": "no"}, r'OUTBOX\["CELERY_WAKEUP"\] has a wrong value: Expected `bool`, got `str`\.'),
            ({"RELAY": {"LANES": "many"}}, r'OUTBOX\["RELAY"\]\["LANES"\] has a wrong value: Expected `int`, got `str`\.'),
            ({"TOPICS": {"orders": {"TYPE": "queue"}}}, "Invalid enum value 'queue'"),
            ({"TOPICS": {"orders": {"BROKER": "nowhere"}}}, r'\["orders"\] names the broker \'nowhere\', which is not in'),
        ],
    )
    def test_says_what_is_wrong_with_the_settings(self, settings, found, outbox, text):
        settings.OUTBOX = outbox

        (problem,) = found()

        assert problem.id == "outbox.E001"
        assert isinstance(problem, Error)
        assert re.search(text, f"{problem.msg} {problem.hint}")

    def test_is_all_that_is_said_of_wrong_settings(self, settings, found):
        settings.OUTBOX = {"BROKERS": BROKERS, "TOPIKS": {}}

        class Good(Message):
            class Meta:
                topic = "orders"

        assert [problem.id for problem in found(include_deployment_checks=True)] == ["outbox.E001"]


class TestE002:
    def test_finds_a_topics_name_that_not_all_brokers_take(self, settings, found):
        settings.OUTBOX = {"BROKERS": BROKERS, "TOPICS": {"a.b": {}, "ab": {}}}

        (problem,) = found()

        assert (problem.id, problem.msg) == ("outbox.E002", "OUTBOX[\"TOPICS\"] has a topic called 'a.b'.")
        assert "1 to 127 letters" in problem.hint


class TestE003:
    def test_finds_a_broker_that_cannot_be_imported(self, settings, found):
        settings.OUTBOX = {"BROKERS": {"default": {"BACKEND": "nowhere.Broker"}}, "TOPICS": {"orders": {}, "bills": {}}}

        (problem,) = found()

        assert problem.id == "outbox.E003"
        assert "'nowhere.Broker' cannot be imported" in problem.msg
        assert problem.hint == "Its topics are: bills, orders. Correct the path, or install nowhere."

    def test_finds_a_backend_that_is_no_broker(self, settings, found):
        settings.OUTBOX = {"BROKERS": {"default": {"BACKEND": "datetime.datetime"}}}

        assert [(problem.id, "is not a Broker class" in problem.msg) for problem in found()] == [("outbox.E003", True)]


OPTIONS = 'OUTBOX["BROKERS"]["default"]'


class TestE004AndW048:
    def test_give_what_the_broker_says_of_its_options(self, settings, found):
        settings.OUTBOX = {"BROKERS": {"default": {"BACKEND": f"{__name__}.FussyBroker"}}}

        assert found() == [
            Finding("outbox.E004", OPTIONS, "COLOUR is no option.", "Take it out."),
            Finding("outbox.W048", OPTIONS, "SPEED is low.", "Raise it."),
        ]

    def test_give_what_the_broker_says_of_topics_for_which_its_options_do_not_do(self, settings, found):
        topics = {"orders": {"TYPE": "transaction"}, "bills": {"TYPE": "normal"}}
        settings.OUTBOX = {"BROKERS": {"default": {"BACKEND": f"{__name__}.BrokerWithoutPorts"}}, "TOPICS": topics}

        assert found() == [
            Finding("outbox.E004", OPTIONS, "Topic orders needs PORTS.", "Give them."),
        ]


class TestE008:
    @pytest.mark.parametrize(("kind", "what"), [("fifo", "keeps no order"), ("delay", "cannot delay messages")])
    def test_finds_a_topic_of_a_type_that_its_broker_does_not_offer(self, settings, found, kind, what):
        settings.OUTBOX = {"BROKERS": ONE_PHASE, "TOPICS": {"orders": {"TYPE": kind}, "bills": {}}}

        (problem,) = found()

        assert problem.id == "outbox.E008"
        assert problem.msg.endswith(f"is of type {kind}, and its broker 'default' (OnePhaseBroker) {what}.")
        assert problem.hint


class TestW009:
    def test_warns_of_half_messages_where_the_broker_has_none(self, settings, found):
        settings.OUTBOX = {"BROKERS": ONE_PHASE, "TOPICS": {"orders": {"TYPE": "transaction"}}}

        (problem,) = found()

        assert (problem.id, type(problem)) == ("outbox.W009", Caution)
        assert "has no half messages" in problem.msg
        assert "in one phase" in problem.hint
