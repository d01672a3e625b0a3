"""Fields of log records."""

import ast
import json
import logging
import re
from pathlib import Path
from uuid import uuid4

import pytest

import outbox
from outbox.check_backs.sources import fields_of
from outbox.logs import log_fields
from outbox.message import Half
from tests.quotes import python_blocks

ROOMS = ("batches", "check_backs", "consuming", "half_first", "publishing", "relay")
SPEAKS = re.compile(r"\b(message|batch|batches|topic|group|broker|database)\b", re.IGNORECASE)


def calls():
    """Return each call of a logger in packages that handle messages, with its file."""
    home = Path(outbox.__file__).parent
    for path in sorted(path for room in ROOMS for path in (home / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "logger":
                yield str(path.relative_to(home)), node


def speaks_of_one(call):
    """Return whether the values a call writes have a name that its record should carry as a field."""
    return bool(SPEAKS.search(" ".join(ast.unparse(argument).replace("_", " ") for argument in call.args)))


class TestEachLine:
    def test_that_speaks_of_a_message_topic_batch_or_group_carries_it(self):
        bare = [
            f"{path}:{call.lineno}: {ast.unparse(call)}"
            for path, call in calls()
            if speaks_of_one(call) and not any(keyword.arg == "extra" for keyword in call.keywords)
        ]

        assert bare == []


class TestLogFields:
    def test_leave_out_what_is_not_known(self):
        assert log_fields(topic="orders", message_id=None) == {"outbox_topic": "orders"}

    def test_are_plain_values(self):
        one = uuid4()

        found = log_fields(message_id=one, message_ids=(each for each in [one]), topics=("b", "a", "a"), batches=[2, 1])

        assert json.loads(json.dumps(found)) == {
            "outbox_message_id": str(one),
            "outbox_message_ids": [str(one)],
            "outbox_topics": ["a", "b"],
            "outbox_batches": [1, 2],
        }

    def test_collide_with_nothing_of_a_record(self):
        every = log_fields(**dict.fromkeys(log_fields.__kwdefaults__, ()))  # type: ignore[arg-type]

        logging.getLogger("outbox").makeRecord("outbox", logging.INFO, "", 0, "", (), None, extra=every)
        assert all(name.startswith("outbox_") for name in every)

    def test_of_a_message_name_its_topic(self):
        half = Half(topic="orders", message_id="7", half_id="h")

        assert fields_of(half) == {"outbox_topic": "orders", "outbox_message_id": "7"}


class TestTheFormatterOfThePage:
    @pytest.fixture
    def formatter(self):
        [block] = [block for block in python_blocks("how-to/logs.md") if "class JsonFormatter" in block]
        names = {}
        exec(block, names)  # noqa: S102
        return names["JsonFormatter"]()

    def test_writes_a_line_of_json_with_the_fields(self, formatter, caplog, monkeypatch):
        monkeypatch.setattr(caplog.handler, "formatter", formatter)  # the handler is the same for all tests
        logger = logging.getLogger("outbox.relay")

        logger.error("Message %s is dead", "7", extra=log_fields(message_id="7", topic="orders"))

        line = json.loads(caplog.text.strip())
        assert (line["level"], line["logger"], line["message"]) == ("ERROR", "outbox.relay", "Message 7 is dead")
        assert (line["outbox_message_id"], line["outbox_topic"]) == ("7", "orders")
