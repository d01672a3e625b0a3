import msgspec
import pytest

from outbox import message
from outbox.schema import snapshot
from outbox.schema.misfits import _Comparison, misfits


@pytest.fixture
def schema_of(define):
    """Return the schema of a type with one field, `thing`."""

    def schema_of(kind):
        message.registered.clear()
        define(fields={"thing": kind})
        return snapshot.take(message.registered).types["OrderPlaced"].schema

    return schema_of


@pytest.fixture
def looks(monkeypatch):
    """The pairs of nodes that are compared."""
    seen, compare = [], _Comparison._compare

    def look(comparison, *part):
        seen.append(part)
        return compare(comparison, *part)

    monkeypatch.setattr(_Comparison, "_compare", look)
    return seen


def nested(levels, leaf):
    """Return a class that has another one as its field, and so on."""
    for number in range(levels):
        leaf = msgspec.defstruct(f"Level{number}", [("inner", leaf)])
    return leaf


class TestMisfits:
    def test_of_a_chain_of_many_classes_are_found(self, schema_of):
        (found,) = misfits(schema_of(nested(100, int)), schema_of(nested(100, str)))

        assert found.path == "thing" + ".inner" * 100

    def test_of_ten_thousand_lines_are_found_by_one_look_at_each(self, schema_of, looks):
        def wide(last):
            fields = [(f"field_{number}", list[int] | None) for number in range(1500)]
            return msgspec.defstruct("Wide", [*fields, ("last", last)])

        before, after = schema_of(wide(int)), schema_of(wide(str))
        assert len(msgspec.json.format(msgspec.json.encode(before)).splitlines()) > 10_000

        found = misfits(before, after)

        assert [one.path for one in found] == ["thing.last"]
        assert len(looks) < 10_000

    def test_of_unions_of_unions_are_found_by_one_look_at_each_pair(self, schema_of, looks):
        def tree(leaf):
            for level in range(12):
                parts = [
                    msgspec.defstruct(f"L{level}{name}", [("a", leaf), ("b", leaf)], tag=f"{level}{name}")
                    for name in ("x", "y", "z")
                ]
                leaf = parts[0] | parts[1] | parts[2]
            return leaf

        before, after = schema_of(tree(int)), schema_of(tree(str))

        found = misfits(before, after)

        assert {one.written for one in found} == {"integer"}
        assert len(looks) < 1000
