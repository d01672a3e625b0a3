import json

import pytest
from django.core.management import CommandError, call_command

from outbox import atomic, message, publish, publish_many
from outbox.message import Message
from tests.commands import exit_code, refused

NOT_WRITTEN = "Nothing was written. Correct the change, or add --accept-breaks if it breaks nobody in your case."
LINE = "Run manage.py outbox_schema --write, and commit it."


@pytest.fixture(autouse=True)
def _own_types(monkeypatch):
    monkeypatch.setattr("outbox.message.registered", {})


@pytest.fixture
def path(tmp_path, settings):
    settings.BASE_DIR = tmp_path
    return tmp_path / "outbox_schema.json"


@pytest.fixture
def schema(capsys):
    """Run the command; return its exit code and the lines that it printed."""

    def schema(*arguments):
        return exit_code("outbox_schema", *arguments), capsys.readouterr().out.splitlines()

    return schema


def release(**fields):
    """Define a message type with these fields."""
    body = {"__module__": "shop.messages", "__annotations__": fields, "Meta": type("Meta", (), {"topic": "orders"})}
    return type(Message)("OrderPlaced", (Message,), body)


class TestCheck:
    def test_fails_where_there_is_no_snapshot(self, schema, path):
        release(order_id=int)

        code, lines = schema("--check")

        assert code == 1
        assert lines == ["!  OrderPlaced is new.", f"{path} does not exist. {LINE}"]

    def test_passes_where_nothing_has_changed(self, schema, path):
        release(order_id=int)
        schema("--write")

        assert schema("--check") == (0, [f"{path} has 1 message type, as they are."])

    def test_fails_where_a_change_that_breaks_nobody_is_not_in_the_snapshot(self, schema, path):
        release(order_id=int)
        schema("--write")
        release(order_id=int).upgrade_from(0)(dict)

        code, lines = schema("--check")

        assert code == 1
        assert lines == ["!  OrderPlaced differs, in a way that breaks nobody.", f"{path} does not have this. {LINE}"]

    def test_names_each_break_and_the_line_that_mends_it(self, schema, path):
        release(order_id=int, customer=str)
        schema("--write")
        release(order_id=int)

        code, lines = schema("--check")

        assert code == 1
        assert lines == [
            "!!  OrderPlaced has lost the field customer, which older messages have.",
            "    Restore it. Or write `version = 2` in class Meta of OrderPlaced, and add a function with "
            "@OrderPlaced.upgrade_from(1).",
            "1 change breaks others.",
        ]

    def test_prints_one_line_of_json(self, schema, path):
        release(order_id=int)

        code, (line,) = schema("--check", "--json")

        assert code == 1
        assert json.loads(line) == {
            "file": str(path),
            "written": False,
            "changes": [{"type": "OrderPlaced", "text": "is new", "hint": "", "breaks": False}],
        }


class TestWrite:
    def test_writes_a_file_that_it_does_not_write_again(self, schema, path):
        release(order_id=int)

        first, again = schema("--write"), schema("--write")

        assert first == (0, ["!  OrderPlaced is new.", f"{path} written, with 1 message type. Commit it."])
        assert again == (0, [f"{path} has 1 message type, as they are."])

    def test_does_not_write_while_a_change_breaks_others(self, schema, path):
        release(order_id=int)
        schema("--write")
        before = path.read_text()
        release(order_id=str)

        code, lines = schema("--write")

        assert (code, lines[-2:]) == (1, ["1 change breaks others.", NOT_WRITTEN])
        assert path.read_text() == before

    def test_writes_breaks_that_are_accepted(self, schema, path):
        release(order_id=int)
        schema("--write")
        release(order_id=str)

        code, lines = schema("--write", "--accept-breaks")

        assert (code, lines[-1]) == (0, f"{path} written, with 1 message type. Commit it.")
        assert schema("--check")[0] == 0

    def test_writes_another_file(self, schema, path, tmp_path):
        other = tmp_path / "other.json"
        release(order_id=int)

        schema("--write", "--file", str(other))

        assert other.exists()
        assert not path.exists()


class TestUnusableInput:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("{", "is not a snapshot"),
            ("<<<<<<< HEAD\n", "has the conflict marker <<<<<<< in line 1"),
            ("[]", "Expected `object`"),
        ],
    )
    @pytest.mark.parametrize("does", ["--check", "--write"])
    def test_in_the_file_ends_the_command_with_a_sentence(self, schema, path, does, text, words):
        path.write_text(text)

        with refused(words):
            schema(does)

        assert path.read_text() == text

    def test_a_file_that_cannot_be_written_ends_it_with_a_sentence(self, schema, tmp_path):
        release(order_id=int)

        with pytest.raises(CommandError, match="cannot be written: No such file or directory"):
            schema("--write", "--file", str(tmp_path / "missing" / "outbox_schema.json"))

    def test_in_a_type_ends_it_with_a_sentence(self, schema, path):
        release(order_id="Nobody")

        with pytest.raises(CommandError, match=r"shop\.messages\.OrderPlaced cannot be described: name 'Nobody' is not defined"):
            schema("--check")

    @pytest.mark.parametrize("arguments", [[], ["--write", "--check"], ["--check", "--accept-breaks"]])
    def test_in_the_arguments_ends_it_with_a_sentence(self, schema, path, arguments):
        with pytest.raises(CommandError, match=r"required|not allowed with|--accept-breaks can only be used with --write"):
            schema(*arguments)


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
class TestAgainstDatabase:
    @pytest.fixture(autouse=True)
    def _outbox(self, settings, no_consumers):
        memory = {"BACKEND": "outbox.brokers.memory.MemoryBroker"}
        settings.OUTBOX = {"BROKERS": {"default": memory}, "TOPICS": {"orders": {"TYPE": "normal"}}, "CELERY_WAKEUP": False}

    def test_names_what_this_code_cannot_read(self, schema):
        release(order_id=int)
        with atomic():
            publish_many([message.registered["OrderPlaced"](number) for number in range(3)])
        release(order_id=str)

        code, lines = schema("--against-database", "--database", "default")

        assert code == 1
        assert lines[0] == "Database 'default': 3 waiting messages read."
        assert lines[1].startswith("!!  3 waiting messages of OrderPlaced version 1 cannot be read: Expected `str`, got `int`")
        assert lines[2].startswith("    Correct OrderPlaced, or raise its version to 2 and add @OrderPlaced.upgrade_from(1).")

    def test_passes_where_this_code_can_read_all(self, schema):
        release(order_id=int)
        with atomic():
            publish(message.registered["OrderPlaced"](1))

        assert schema("--against-database", "--all") == (
            0,
            ["Database 'default': 1 waiting message read.", "Database 'other': no stored messages read."],
        )

    def test_prints_one_line_of_json(self, schema):
        code, (line,) = schema("--against-database", "--json", "--database", "default")

        assert code == 0
        assert json.loads(line) == {"databases": {"default": {"read": {}, "cut": [], "foreign": 0, "problems": []}}}

    def test_tells_that_there_are_more(self, schema, monkeypatch):
        monkeypatch.setattr("outbox.monitoring.stored.SAMPLE", 200)
        release(order_id=int)
        with atomic():
            publish_many([message.registered["OrderPlaced"](number) for number in range(250)])

        code, lines = schema("--against-database", "--database", "default")

        assert (code, lines) == (
            0,
            ["Database 'default': 200 waiting messages (not all) read.", "With --all, all messages are read."],
        )

    def test_tells_how_far_it_is(self, monkeypatch, capsys):
        monkeypatch.setattr("outbox.management.commands.outbox_schema.REPORT_EVERY", 100)
        release(order_id=int)
        with atomic():
            publish_many([message.registered["OrderPlaced"](number) for number in range(250)])

        call_command("outbox_schema", "--against-database", "--all", "--database", "default")

        assert capsys.readouterr().err.splitlines() == ["100 waiting messages read", "200 waiting messages read"]

    def test_names_a_brokers_database_that_is_not_in_settings(self, schema, settings):
        embedded = {"BACKEND": "outbox.embedded.EmbeddedBroker", "OPTIONS": {"DATABASE": "missing"}}
        settings.OUTBOX = {**settings.OUTBOX, "BROKERS": {"default": embedded}}

        with pytest.raises(CommandError, match="Broker 'default' is stored in database 'missing', which is not in settings"):
            schema("--against-database")

    def test_refuses_a_database_that_is_not_in_settings(self, schema):
        with pytest.raises(CommandError, match="There is no database 'missing' in settings"):
            schema("--against-database", "--database", "missing")
