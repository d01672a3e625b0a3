import re
import subprocess
import sys

import pytest
from django.core.checks import Error, Warning, run_checks  # noqa: A004

from outbox import checks
from outbox.brokers.base import Problem
from outbox.brokers.memory import MemoryBroker
from outbox.message import Message

MEMORY = "outbox.brokers.memory.MemoryBroker"
BROKERS = {"default": {"BACKEND": MEMORY}}


class FussyBroker(MemoryBroker):
    @classmethod
    def check_options(cls, options):
        return [
            Problem("COLOUR is no option.", "Take it out."),
            Problem("SPEED is low.", "Raise it.", is_error=False),
        ]


@pytest.fixture(autouse=True)
def _own_types(monkeypatch):
    monkeypatch.setattr("outbox.message._types", {})


def found():
    """What the system checks of this app say."""
    return [problem for problem in run_checks() if str(problem.id).startswith("outbox.")]


class TestE001:
    @pytest.mark.parametrize(
        ("outbox", "text"),
        [
            ({"TOPIKS": {}}, "OUTBOX has an unknown setting 'TOPIKS'.*Did you mean TOPICS?"),
            ({"NUDGE": "no"}, r"OUTBOX has a wrong value: Expected `bool`, got `str` - at `\$.NUDGE`"),
            ({"RELAY": {"LANES": "many"}}, r"Expected `int`, got `str` - at `\$.RELAY.LANES`"),
            ({"TOPICS": {"orders": {"TYPE": "queue"}}}, "Invalid enum value 'queue'"),
            ({"TOPICS": {"orders": {"BROKER": "nowhere"}}}, r'\["orders"\] names the broker \'nowhere\', which is not in'),
        ],
    )
    def test_says_what_is_wrong_with_the_settings(self, settings, outbox, text):
        settings.OUTBOX = outbox

        (problem,) = found()

        assert problem.id == "outbox.E001"
        assert isinstance(problem, Error)
        assert re.search(text, problem.msg)
        assert problem.hint


class TestE002:
    def test_finds_a_topics_name_that_not_all_brokers_take(self, settings):
        settings.OUTBOX = {"BROKERS": BROKERS, "TOPICS": {"a.b": {}, "ab": {}}}

        (problem,) = found()

        assert (problem.id, problem.msg) == ("outbox.E002", "OUTBOX[\"TOPICS\"] has a topic called 'a.b'.")
        assert "1 to 127 letters" in problem.hint


class TestE003:
    def test_finds_a_broker_that_cannot_be_imported(self, settings):
        settings.OUTBOX = {"BROKERS": {"default": {"BACKEND": "nowhere.Broker"}}, "TOPICS": {"orders": {}, "bills": {}}}

        (problem,) = found()

        assert problem.id == "outbox.E003"
        assert "'nowhere.Broker' cannot be imported" in problem.msg
        assert problem.hint == "Topics that go there: bills, orders."

    def test_finds_a_backend_that_is_no_broker(self, settings):
        settings.OUTBOX = {"BROKERS": {"default": {"BACKEND": "datetime.datetime"}}}

        assert [(problem.id, "is not a Broker class" in problem.msg) for problem in found()] == [("outbox.E003", True)]


class TestE004AndW004:
    def test_give_what_the_broker_says_of_its_options(self, settings):
        settings.OUTBOX = {"BROKERS": {"default": {"BACKEND": f"{__name__}.FussyBroker"}}}

        assert found() == [
            Error('OUTBOX["BROKERS"]["default"]: COLOUR is no option.', hint="Take it out.", id="outbox.E004"),
            Warning('OUTBOX["BROKERS"]["default"]: SPEED is low.', hint="Raise it.", id="outbox.W004"),
        ]


class TestE005:
    def test_finds_a_message_type_without_a_topic(self, settings):
        settings.OUTBOX = {"BROKERS": BROKERS}

        class Homeless(Message):
            pass

        (problem,) = found()
        assert problem.id == "outbox.E005"
        assert "Homeless names no topic: it cannot be published." in problem.msg

    def test_leaves_the_base_of_others_alone(self, settings):
        settings.OUTBOX = {"BROKERS": BROKERS, "TOPICS": {"orders": {}}}

        class Base(Message):
            pass

        class Derived(Base):
            class Meta:
                topic = "orders"

        assert found() == []


class TestE006:
    def test_finds_a_message_type_whose_topic_is_not_in_settings(self, settings):
        settings.OUTBOX = {"BROKERS": BROKERS, "TOPICS": {"orders": {}}}

        class Stray(Message):
            class Meta:
                topic = "oders"

        (problem,) = found()
        assert problem.id == "outbox.E006"
        assert "Stray: Topic 'oders' is not in OUTBOX[\"TOPICS\"]. Did you mean 'orders'?" in problem.msg


class TestE007:
    def test_finds_a_database_that_is_not_postgresql(self):
        code = (
            "from django.conf import settings; import django\n"
            "sqlite = {'ENGINE': 'django.db.backends.sqlite3', 'NAME': ':memory:'}\n"
            "settings.configure(INSTALLED_APPS=['outbox'], DATABASES={'default': sqlite},\n"
            f"    OUTBOX={{'BROKERS': {{'default': {{'BACKEND': '{MEMORY}'}}}}}})\n"
            "django.setup(); from django.core.management import call_command; call_command('migrate', skip_checks=False)"
        )

        outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

        assert outcome.returncode == 1
        assert (
            "(outbox.E007) Database 'default' is sqlite. The outbox needs PostgreSQL 13 or later, by psycopg 3." in outcome.stderr
        )

    def test_finds_psycopg2(self, settings, monkeypatch):
        settings.OUTBOX = {"BROKERS": BROKERS}
        monkeypatch.setattr(checks, "is_psycopg3", False)

        assert ["is reached by psycopg2" in problem.msg for problem in found()] == [True]


class TestTheChecks:
    def test_find_nothing_wrong_with_good_settings(self, settings):
        settings.OUTBOX = {"BROKERS": BROKERS, "TOPICS": {"orders": {}}}

        class Good(Message):
            class Meta:
                topic = "orders"

        assert found() == []

    def test_are_complete_when_settings_are_wrong_and_types_too(self, settings):
        settings.OUTBOX = {"BROKERS": BROKERS, "TOPIKS": {}}

        class Good(Message):
            class Meta:
                topic = "orders"

        assert [problem.id for problem in found()] == ["outbox.E001"]
