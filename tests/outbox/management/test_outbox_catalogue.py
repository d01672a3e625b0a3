import json

import pytest
from django.core.management import CommandError, call_command

from outbox import Message, message
from outbox.management.commands import outbox_catalogue
from tests.factories import MessageRowFactory, TopicFactory

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.fixture(autouse=True)
def _types_of_the_shop(monkeypatch):
    """Forget the types that other tests define, whose topics are not in the settings."""
    types = {name: kind for name, kind in message.registered.items() if kind.__module__.startswith("project.")}
    monkeypatch.setattr(message, "registered", types)


@pytest.fixture
def published():
    return MessageRowFactory(topic=TopicFactory(name="orders"), headers='{"ce-type": "OrderPlaced"}')


class TestTheCommand:
    def test_shows_topics_types_handlers_and_the_newest_messages(self, published, capsys):
        call_command("outbox_catalogue", database=["default"])

        lines = capsys.readouterr().out.splitlines()
        begin = next(number for number, line in enumerate(lines) if line.startswith("Topic 'orders', of type transaction"))
        assert lines[begin + 1] == "Published once: a message that is sent again is not stored again."
        assert "OrderPlaced, version 1, key invoice: project.shop.messages.OrderPlaced" in lines
        assert any(line.startswith("default   OrderPlaced     published         1") for line in lines)

    def test_prints_json_with_schemas_and_examples(self, published, capsys):
        call_command("outbox_catalogue", json=True)

        shown = json.loads(capsys.readouterr().out)
        [orders] = [topic for topic in shown["topics"] if topic["name"] == "orders"]
        assert orders["promise"]["how_often"] == "once"
        assert orders["types"][0]["example"]["invoice"] == "text"
        assert {alias: len(found) for alias, found in shown["newest"].items()} == {"default": 1, "other": 0}

    def test_prints_an_asyncapi_document_without_a_database(self, capsys, monkeypatch):
        monkeypatch.setattr(outbox_catalogue, "connected", None)

        call_command("outbox_catalogue", asyncapi=True)

        shown = json.loads(capsys.readouterr().out)
        assert (shown["asyncapi"], shown["channels"]["orders"]["address"]) == ("3.0.0", "orders")

    @pytest.mark.parametrize(
        ("more", "text"), [(["--json"], "not allowed with"), (["--database", "default"], "--database cannot be used")]
    )
    def test_refuses_options_that_do_not_go_with_asyncapi(self, more, text):
        with pytest.raises(CommandError, match=text):
            call_command("outbox_catalogue", "--asyncapi", *more)

    def test_ends_with_1_where_a_topic_is_not_in_the_settings(self, settings, capsys):
        topics = {name: topic for name, topic in settings.OUTBOX["TOPICS"].items() if name != "orders"}
        settings.OUTBOX = {**settings.OUTBOX, "TOPICS": topics}

        with pytest.raises(SystemExit) as exit_:
            call_command("outbox_catalogue", database=["default"])

        assert exit_.value.code == 1
        assert "Topic 'orders', which is not in settings" in capsys.readouterr().out

    def test_shows_all_types_where_one_cannot_be_described(self, capsys):
        class Odd(Message):
            thing: complex

            class Meta:
                topic = "orders"

        with pytest.raises(SystemExit) as exit_:
            call_command("outbox_catalogue", database=["default"])

        assert exit_.value.code == 1
        shown = capsys.readouterr().out
        assert "! Message type tests.outbox.management.test_outbox_catalogue" in shown
        assert "OrderPlaced, version 1" in shown
        with pytest.raises(CommandError, match="Odd cannot be described"):
            call_command("outbox_catalogue", asyncapi=True)

    def test_says_that_nothing_is_there(self, monkeypatch, capsys):
        monkeypatch.setattr(outbox_catalogue, "read_entries", list)

        call_command("outbox_catalogue", database=["default"])

        assert capsys.readouterr().out == "There is no topic.\n"
