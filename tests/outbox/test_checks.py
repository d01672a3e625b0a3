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
URL = "https://shop.example/outbox/check-back/"
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


class TestE013:
    def test_finds_a_mask_that_names_no_field(self, settings):
        settings.OUTBOX = {"BROKERS": BROKERS, "TOPICS": {"orders": {}}}

        class Masked(Message):
            customer: str

            class Meta:
                topic = "orders"
                mask = ["customer", "costumer"]

        (problem,) = found()
        assert problem.id == "outbox.E013"
        assert "Masked masks 'costumer', which is none of its fields" in problem.msg


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


class OnePhaseBroker(MemoryBroker):
    supports_half_messages = supports_order = supports_delay = False


ONE_PHASE = {"default": {"BACKEND": f"{__name__}.OnePhaseBroker"}}


class TestE008:
    @pytest.mark.parametrize(("kind", "what"), [("fifo", "keeps no order"), ("delay", "delays nothing")])
    def test_finds_a_topic_of_a_type_that_its_broker_does_not_offer(self, settings, kind, what):
        settings.OUTBOX = {"BROKERS": ONE_PHASE, "TOPICS": {"orders": {"TYPE": kind}, "bills": {}}}

        (problem,) = found()

        assert problem.id == "outbox.E008"
        assert problem.msg.endswith(f"is of type {kind}, and its broker 'default' (OnePhaseBroker) {what}.")
        assert problem.hint


class TestW009:
    def test_warns_of_half_messages_where_the_broker_has_none(self, settings):
        settings.OUTBOX = {"BROKERS": ONE_PHASE, "TOPICS": {"orders": {"TYPE": "transaction"}}}

        (problem,) = found()

        assert (problem.id, type(problem)) == ("outbox.W009", Warning)
        assert "has no half messages" in problem.msg
        assert "one-phase" in problem.hint


class TestE010:
    def test_finds_a_rate_that_cannot_be_read(self, settings):
        settings.OUTBOX = {"BROKERS": BROKERS, "CHECK_BACK": {"THROTTLE": "many"}}

        (problem,) = found()

        assert problem.id == "outbox.E010"
        assert "[\"THROTTLE\"] is 'many'. Write a number and a time" in problem.msg
        assert problem.hint


class TestE011:
    def test_finds_a_secret_that_is_none_and_does_not_show_it(self, settings):
        settings.OUTBOX = {"BROKERS": BROKERS, "CHECK_BACK": {"URL": URL, "SECRETS": ["whsec_eA==", "whsec_tells"]}}

        (problem,) = found()

        assert problem.id == "outbox.E011"
        assert '["SECRETS"], number 2: A secret is not base64' in problem.msg
        assert "tell" not in f"{problem.msg}{problem.hint}"


class TestE012:
    @pytest.mark.parametrize(
        ("check_back", "text"),
        [
            ({"URL": URL}, r"\[\"SECRETS\"\] is empty"),
            ({"URL": "shop.example", "SECRETS": ["whsec_eA=="]}, "does not begin with http:// or https://"),
        ],
    )
    def test_finds_a_url_that_cannot_be_asked(self, settings, check_back, text):
        settings.OUTBOX = {"BROKERS": BROKERS, "CHECK_BACK": check_back}

        (problem,) = found()

        assert problem.id == "outbox.E012"
        assert re.search(text, problem.msg)
        assert problem.hint

    def test_leaves_one_alone_that_can(self, settings):
        settings.OUTBOX = {"BROKERS": BROKERS, "CHECK_BACK": {"URL": URL, "SECRETS": ["whsec_eA=="]}}

        assert found() == []


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
