"""Only `outbox/batches` writes `outbox_batch`, one module message rows, and each edge of the drawing is a function."""

import re
from importlib import import_module
from pathlib import Path

from django.conf import settings

import outbox

PACKAGE = Path(outbox.__file__).parent
ROOM = PACKAGE / "batches"
OTHERS = [path for path in PACKAGE.rglob("*.py") if ROOM not in path.parents and "migrations" not in path.parts]

WRITES = re.compile(r"\b(UPDATE|INSERT\s+INTO|DELETE\s+FROM|MERGE\s+INTO|TRUNCATE|COPY)\s+(TABLE\s+|ONLY\s+)?outbox_batch\b")
NUMBERED_STATE = re.compile(r"\bstate\s*(=|IN\s*\()\s*\d")

DRAWING = settings.BASE_DIR / "docs" / "state-machine.md"
FUNCTION = re.compile(r"`batches/(\w+)\.py` `(\w+)`")


class TestTheTable:
    def test_is_written_in_its_room_only(self):
        writers = [path.relative_to(PACKAGE) for path in OTHERS if WRITES.search(path.read_text())]

        assert writers == []

    def test_has_its_states_written_by_name(self):
        numbered = {path.name: NUMBERED_STATE.findall(path.read_text()) for path in ROOM.glob("*.py")}

        assert {name: found for name, found in numbered.items() if found} == {}


class TestMessageRows:
    def test_are_written_by_the_statements_of_one_module(self):
        insert = re.compile(r"\bINSERT\s+INTO\s+outbox_message\b")

        writers = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if insert.search(path.read_text())]

        assert writers == ["database/message_rows.py"]


class TestTheDrawing:
    def test_names_a_function_for_each_step(self):
        named = FUNCTION.findall(DRAWING.read_text())

        missing = [(room, name) for room, name in named if not hasattr(import_module(f"outbox.batches.{room}"), name)]

        assert named
        assert missing == []

    def test_names_every_room_that_writes(self):
        writers = {path.stem for path in ROOM.glob("*.py") if WRITES.search(path.read_text())}

        assert writers - {room for room, _ in FUNCTION.findall(DRAWING.read_text())} == set()
