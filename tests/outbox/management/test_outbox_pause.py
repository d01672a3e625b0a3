import json
from contextlib import suppress
from functools import partial

import pytest
from django.core.management import call_command

from outbox.management.acts import actor
from outbox.models import Topic
from tests.commands import exit_code, refused
from tests.factories import TopicFactory

pause = partial(exit_code, "outbox_pause", "--database", "default")

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _topic(db):
    TopicFactory(name="orders", broker="default", type="transaction")


def orders():
    return Topic.objects.get(name="orders")


class TestOutboxPause:
    def test_pauses_a_topic_and_keeps_who_and_why(self, capsys):
        assert pause("orders", "--by", "ada", "--reason", "the warehouse moves") == 0

        topic = orders()
        assert (topic.paused, topic.paused_by, topic.pause_reason) == (True, "ada", "the warehouse moves")
        assert capsys.readouterr().out == (
            f"Database 'default': topic 'orders' is paused by ada since {topic.paused_at:%Y-%m-%d %H:%M:%S %Z}: "
            "the warehouse moves\n"
        )

    def test_names_user_and_host_where_nobody_is_named(self):
        pause("orders")

        assert orders().paused_by == actor("outbox_pause")

    def test_resumes_a_topic(self, capsys):
        pause("orders")
        capsys.readouterr()

        assert pause("orders", "--resume") == 0

        assert (orders().paused, orders().paused_by) == (False, "")
        assert capsys.readouterr().out == "Database 'default': topic 'orders' is resumed.\n"

    def test_leaves_another_ones_pause_as_it_is(self, capsys):
        pause("orders", "--by", "ada", "--reason", "the warehouse moves")
        capsys.readouterr()

        assert pause("orders", "--by", "bob") == 1

        assert orders().paused_by == "ada"
        assert "was paused before by ada since" in capsys.readouterr().out

    def test_says_that_a_topic_was_not_paused(self, capsys):
        assert pause("orders", "--resume") == 1

        assert capsys.readouterr().out == "Database 'default': topic 'orders' was not paused.\n"

    def test_shows_one_line_of_json(self, capsys):
        pause("orders", "--by", "ada", "--json")
        paused = json.loads(capsys.readouterr().out)
        at = orders().paused_at
        pause("orders", "--resume", "--json")
        resumed = json.loads(capsys.readouterr().out)

        found = paused["databases"]["default"]
        assert paused["topic"] == "orders"
        assert (found["is_paused"], found["paused_by"], found["pause_reason"], found["changed"]) == (True, "ada", "", True)
        assert found["paused_at"] == at.isoformat()
        assert resumed == {"topic": "orders", "databases": {"default": {"is_paused": False, "changed": True}}}

    def test_lists_the_topics_where_there_is_no_such(self, settings):
        settings.OUTBOX = {**settings.OUTBOX, "TOPICS": {"letters": {}}}
        Topic.objects.exclude(name="orders").delete()

        with refused(r"There is no topic 'order'\. Choices are: letters, orders\."):
            pause("order")

    def test_pauses_a_topic_to_which_nobody_has_published_yet(self, settings):
        settings.OUTBOX = {**settings.OUTBOX, "TOPICS": {"letters": {}}}
        Topic.objects.filter(name="letters").delete()

        assert pause("letters") == 0

        assert Topic.objects.get(name="letters").paused

    @pytest.mark.django_db(databases=["default", "other"], transaction=True)
    def test_pauses_it_in_all_databases(self, capsys):
        TopicFactory._meta.model.objects.using("other").get_or_create(name="orders", defaults={"type": "transaction"})

        call_command("outbox_pause", "orders", "--json")

        found = json.loads(capsys.readouterr().out)["databases"]
        assert {alias for alias, one in found.items() if one["is_paused"]} >= {"default", "other"}
        call_command("outbox_pause", "orders", "--resume")


class TestAPausedTopic:
    def test_is_shown_by_outbox_status_with_who_since_when_and_why(self, capsys):
        pause("orders", "--by", "ada", "--reason", "the warehouse moves")
        capsys.readouterr()

        status()
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("orders"))
        status("--json")
        topics = json.loads(capsys.readouterr().out)["databases"][0]["topics"]

        assert "paused by ada for 0." in line
        assert line.endswith(": the warehouse moves")
        [shown] = [topic for topic in topics if topic["name"] == "orders"]
        assert (shown["is_paused"], shown["paused_by"], shown["pause_reason"]) == (True, "ada", "the warehouse moves")
        assert 0 <= shown["paused_seconds"] < 60

    def test_keeps_its_messages_until_it_is_resumed(self, publish, capsys):
        publish(1)
        pause("orders")
        while_paused = relayed(capsys)
        pause("orders", "--resume")

        assert (while_paused, relayed(capsys)) == (0, 1)


def status(*arguments):
    with suppress(SystemExit):  # it ends with 1: no relay is running
        call_command("outbox_status", "--database", "default", *arguments)


def relayed(capsys):
    """Relay what waits; return how many messages were sent."""
    capsys.readouterr()
    call_command("outbox_relay", "--once", "--json", "--database", "default", "--broker", "default")
    return sum(relay["sent"] for relay in json.loads(capsys.readouterr().out)["relays"])
