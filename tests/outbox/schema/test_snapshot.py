from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime, time
from typing import Any, Literal

import pytest

from outbox import message
from outbox.errors import InvalidMessageType, UnreadableSnapshot
from outbox.message import Message
from outbox.schema import snapshot
from outbox.schema.misfits import misfits
from outbox.schema.snapshot import Snapshot
from tests.outbox.choices import OrderState, Stars

IN_ANOTHER_PROCESS = """
from typing import Literal
from outbox.message import Message, message_types
from outbox.schema import snapshot

class OrderPlaced(Message):
    state: Literal["new", "paid", "sent", "back", "lost"]
    tags: frozenset[str] = frozenset({"a", "b", "c", "d", "e"})

print(snapshot.as_text(snapshot.take(message_types())), end="")
"""


class Category(Message):
    name: str
    within: Category | None = None

    class Meta:
        topic = "orders"
        type = "schema.Category"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "outbox_schema.json"


@pytest.fixture
def taken(define):
    define()
    return snapshot.take(message.registered)


class TestTake:
    def test_has_what_others_rely_on(self, define):
        define(fields={"order_id": int, "state": Literal["new", "old"]}, defaults={"state": "new"}, version=2, upgrades=(1,))

        text = snapshot.as_text(snapshot.take(message.registered))

        assert json.loads(text) == {
            "format": 1,
            "types": {
                "OrderPlaced": {
                    "key": "order_id",
                    "schema": {
                        "properties": {"order_id": {"type": "integer"}, "state": {"enum": ["new", "old"]}},
                        "required": ["order_id"],
                        "type": "object",
                    },
                    "tag": "",
                    "topic": "orders",
                    "upgrades": [1],
                    "version": 2,
                }
            },
        }

    def test_refers_to_itself_in_a_recursive_type(self):
        schema = snapshot.take({"Category": Category}).types["Category"].schema

        assert schema.definitions == {}
        assert [node.ref for node in schema.properties["within"].any_of] == ["#", None]
        assert misfits(schema, schema) == []

    def test_leaves_out_what_changes_nothing_for_others(self, define):
        define(defaults={"__doc__": "An order was placed.", "order_id": 7}, mask=["order_id"])
        first = snapshot.take(message.registered)
        define(defaults={"order_id": 8})

        assert snapshot.take(message.registered) == first

    @pytest.mark.parametrize(
        ("kind", "path"),
        [
            (datetime, []),
            (datetime | None, ["anyOf", 0]),
            (list[datetime], ["items"]),
            (dict[str, list[datetime]], ["additionalProperties", "items"]),
            (tuple[int, datetime], ["prefixItems", 1]),
        ],
        ids=str,
    )
    def test_tells_times_from_texts(self, define, kind, path):
        define(fields={"at": kind, "on": time})

        node = json.loads(snapshot.as_text(snapshot.take(message.registered)))["types"]["OrderPlaced"]["schema"]["properties"]

        assert node["on"] == {"format": "time", "type": "string"}
        node = node["at"]
        for step in path:
            node = node[step]
        assert node == {"format": "date-time", "type": "string"}

    def test_has_the_values_of_djangos_choices(self, define):
        define(fields={"state": OrderState, "stars": list[Stars]})

        properties = snapshot.take(message.registered).types["OrderPlaced"].schema.properties
        assert properties["state"].enum == ["new", "paid"]
        assert properties["stars"].items.enum == [1, 2]

    @pytest.mark.parametrize(
        ("annotation", "text"),
        [("Nobody", "name 'Nobody' is not defined"), (complex, "complex"), (Any | complex, "complex")],
        ids=["name", "type", "union"],
    )
    def test_names_the_type_that_cannot_be_described(self, define, annotation, text):
        define(fields={"who": annotation})

        with pytest.raises(InvalidMessageType, match=rf"^Message type shop\.messages\.OrderPlaced cannot be described: .*{text}"):
            snapshot.take(message.registered)


class TestAsText:
    def test_is_the_same_for_a_union_in_another_order(self, define):
        texts = []
        for kind in (int | str | None, None | str | int):
            define(fields={"thing": kind})
            texts.append(snapshot.as_text(snapshot.take(message.registered)))

        assert texts[0] == texts[1]

    def test_is_the_same_in_every_process(self):
        texts = {
            subprocess.run(
                [sys.executable, "-c", IN_ANOTHER_PROCESS],
                env={**os.environ, "PYTHONHASHSEED": seed},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for seed in ("1", "2", "3")
        }

        assert len(texts) == 1

    def test_ends_with_one_line_end(self, taken):
        text = snapshot.as_text(taken)

        assert text.endswith("}\n")
        assert text == snapshot.as_text(taken)

    def test_changes_one_line_for_one_field(self, define, taken):
        define(fields={"order_id": int, "customer": str}, defaults={"customer": ""})

        before, after = snapshot.as_text(taken).splitlines(), snapshot.as_text(snapshot.take(message.registered)).splitlines()

        assert len(after) - len(before) == 3
        assert [line for line in before if line not in after] == []


class TestRead:
    def test_returns_what_was_written(self, path, taken):
        snapshot.write(path, taken)

        assert snapshot.read(path) == taken

    def test_is_empty_where_there_is_no_file(self, path):
        assert snapshot.read(path) == Snapshot()

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", "is not a snapshot: Input data was truncated"),
            ('{"types": {', "is not a snapshot: Input data was truncated"),
            ('{"types": {},}', "is not a snapshot: JSON is malformed: .* \\(byte 13\\)"),
            ("[]", "is not a snapshot: Expected `object`, got `array`"),
            (
                '{"types": {"A": {"version": "1"}}}',
                r"is not a snapshot: Expected `int`, got `str` - at `\$\.types\[\.\.\.\]\.version`",
            ),
            ('{"types": {"A": {}}}', r"is not a snapshot: Object missing required field `version` - at `\$\.types"),
            ('{"format": 2}', "has the format 2, but this release reads only 1. Install the release that wrote the file."),
            ('{"types": %s}' % ('{"A": ' * 100_000), "is not a snapshot: "),
        ],
        ids=["empty", "cut", "malformed", "array", "wrong type", "missing", "newer", "deep"],
    )
    def test_names_what_is_wrong_with_the_file(self, path, text, words):
        path.write_text(text)

        with pytest.raises(UnreadableSnapshot, match=words) as raised:
            snapshot.read(path)

        assert str(raised.value).startswith(str(path))
        assert raised.value.hint

    @pytest.mark.parametrize("ref", ["#/$defs/Place", "somewhere", "#/$defs/Loop"])
    def test_names_a_reference_that_leads_nowhere(self, path, taken, ref):
        content = json.loads(snapshot.as_text(taken))
        schema = content["types"]["OrderPlaced"]["schema"]
        schema["properties"]["order_id"] = {"$ref": ref}
        if "Loop" in ref:
            schema["$defs"] = {"Loop": {"$ref": ref}}
        path.write_text(json.dumps(content))

        with pytest.raises(UnreadableSnapshot, match=r"is not a snapshot: .*OrderPlaced"):
            snapshot.read(path)

    def test_names_the_line_of_a_conflict(self, path, taken):
        lines = snapshot.as_text(taken).splitlines(keepends=True)
        path.write_text("".join([*lines[:2], "<<<<<<< HEAD\n", *lines[2:3], "=======\n", ">>>>>>> feature\n", *lines[3:]]))

        with pytest.raises(UnreadableSnapshot, match=r"has the conflict marker <<<<<<< in line 3\. Keep the side of the branch"):
            snapshot.read(path)

    def test_names_a_file_that_is_not_a_text(self, path):
        path.write_bytes(b"\xff\xfe{")

        with pytest.raises(UnreadableSnapshot, match="is not a text in UTF-8"):
            snapshot.read(path)

    def test_names_what_cannot_be_opened(self, tmp_path):
        with pytest.raises(
            UnreadableSnapshot, match=r"cannot be read: Is a directory\. Correct its permissions, or name another"
        ):
            snapshot.read(tmp_path)


class TestWrite:
    def test_leaves_a_file_alone_that_has_it(self, path, taken):
        assert snapshot.write(path, taken) is True
        before = path.stat().st_mtime_ns

        assert snapshot.write(path, taken) is False
        assert path.stat().st_mtime_ns == before

    def test_names_what_cannot_be_written(self, tmp_path, taken):
        with pytest.raises(UnreadableSnapshot, match=r"missing/outbox\.json cannot be written: No such file or directory"):
            snapshot.write(tmp_path / "missing" / "outbox.json", taken)
