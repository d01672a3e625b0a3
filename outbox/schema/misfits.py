"""
Compare two schemas: find the parts of bodies of the one (`written`) that a reader with the other one (`read`) rejects or ignores.

Such a part is called a misfit.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

import msgspec

from outbox.schema.snapshot import Node, Schema

MAX_VALUES = 5  # values of an enum that a text shows

ANY = Node()

# Python type of a value -> types of nodes that accept the value.
TYPES: dict[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    type(None): ("null",),
}

# Keyword -> the words for it, and whether a reader with a greater limit rejects more values.
LIMITS = {
    "minimum": ("at least {}", True),
    "exclusive_minimum": ("more than {}", True),
    "min_length": ("at least {} characters", True),
    "min_items": ("at least {} items", True),
    "min_properties": ("at least {} entries", True),
    "maximum": ("at most {}", False),
    "exclusive_maximum": ("less than {}", False),
    "max_length": ("at most {} characters", False),
    "max_items": ("at most {} items", False),
    "max_properties": ("at most {} entries", False),
}

# Keywords whose values must be equal in both schemas.
EXACT = {"format": "{}", "content_encoding": "{}", "pattern": "like {}", "multiple_of": "a multiple of {}"}


class MisfitKind(enum.Enum):
    """Why a part of a body does not fit."""

    REFUSED = enum.auto()  # the reader does not accept the value
    MISSING = enum.auto()  # a field that the reader requires may be missing
    IGNORED = enum.auto()  # the body has a field that the reader does not know


class Misfit(msgspec.Struct, frozen=True):
    """
    A part of a body that a reader rejects or ignores.

    Args:
        path: the field, such as `address.street` or `lines[].price`; "" for the body itself.
        written, read: the type that each side has for the field, in words.
        alike: with IGNORED, other fields of the same object that only the reader knows and whose schema is the same.
    """

    path: str
    kind: MisfitKind
    written: str = ""
    read: str = ""
    alike: tuple[str, ...] = ()


def misfits(written: Schema, read: Schema) -> list[Misfit]:
    """Return the parts of bodies of one schema that do not fit a reader with another one, one for each path and kind."""
    by_path: dict[tuple[str, MisfitKind], Misfit] = {}
    for misfit in _Comparison(written, read).run(written, read):
        by_path.setdefault((misfit.path, misfit.kind), misfit)
    return list(by_path.values())


_Part = tuple[str, Node, Node]
"""A path, and the two nodes at this path that have to be compared: the written one and the read one."""


class _Comparison(msgspec.Struct):
    """Walks two schemas side by side. Each pair of nodes is compared only once, so that recursive types end."""

    writer: Schema
    reader: Schema
    fitting: dict[tuple[int, int], bool] = msgspec.field(default_factory=dict)  # by the ids of a written and a read node

    def run(self, written: Node, read: Node) -> Iterator[Misfit]:
        todo: list[_Part] = [("", written, read)]
        compared = set()
        while todo:
            part = todo.pop()
            key = id(self.writer.resolve(part[1])), id(self.reader.resolve(part[2]))
            if key not in compared:
                compared.add(key)
                for misfit in self._compare(*part):
                    if isinstance(misfit, tuple):
                        todo.append(misfit)
                    else:
                        yield misfit

    def _fits(self, written: Node, read: Node) -> bool:
        key = id(self.writer.resolve(written)), id(self.reader.resolve(read))
        if key not in self.fitting:
            self.fitting[key] = True  # for recursive types, which fit if no other misfit is found
            self.fitting[key] = next(self.run(written, read), None) is None
        return self.fitting[key]

    def _compare(self, path: str, written: Node, read: Node) -> Iterator[Misfit | _Part]:
        """Compare each alternative of the written node with the alternatives of the read node."""
        choices = self.reader.resolve(read).any_of or [read]
        for node in self.writer.resolve(written).any_of or [written]:
            alternative = self.writer.resolve(node)
            if alternative.enum is not None:
                refused = [value for value in alternative.enum if not any(self._accepts(choice, value) for choice in choices)]
                if refused:
                    yield Misfit(path, MisfitKind.REFUSED, _listed(refused), _in_words(read, self.reader))
            elif len(choices) == 1 or not any(self._fits(node, choice) for choice in choices):
                resolved = [self.reader.resolve(choice) for choice in choices]
                alike = [choice for choice in resolved if choice == ANY or _is_alike(alternative, choice)]
                if len(alike) == 1:
                    yield from _compare_alike(path, alternative, alike[0])
                else:
                    yield Misfit(path, MisfitKind.REFUSED, _in_words(node, self.writer), _in_words(read, self.reader))

    def _accepts(self, choice: Node, value: object) -> bool:
        """Return whether a node accepts a value of an enum; only the node's type is considered."""
        node = self.reader.resolve(choice)
        if node.enum is not None:
            return any(value == allowed and type(value) is type(allowed) for allowed in node.enum)
        return node == ANY or node.type in TYPES.get(type(value), ())


def _is_alike(written: Node, read: Node) -> bool:
    """Return whether two nodes have the same type and, if they are classes with a tag, the same tag."""
    if read.enum is not None or (written.type != read.type and (written.type, read.type) != ("integer", "number")):
        return False
    pairs = [
        (node, (read.properties or {})[name])
        for name, node in (written.properties or {}).items()
        if name in (read.properties or {})
    ]
    enums = [(node.enum, other.enum) for node, other in pairs if node.enum is not None and other.enum is not None]
    return all(any(value in read_values for value in written_values) for written_values, read_values in enums)


def _compare_alike(path: str, written: Node, read: Node) -> Iterator[Misfit | _Part]:
    if _is_limited(written, read):
        yield Misfit(path, MisfitKind.REFUSED, describe(written), describe(read))
    elif read.type == "object":
        yield from _compare_objects(path, written, read)
    elif read.type == "array":
        yield from _compare_arrays(path, written, read)


def _compare_objects(path: str, written: Node, read: Node) -> Iterator[Misfit | _Part]:
    fields, read_fields = written.properties or {}, read.properties or {}
    read_others = read.additional_properties  # the schema of fields that the reader does not name
    for name, node in read_fields.items():
        at = f"{path}.{name}".lstrip(".")
        if name in fields:
            yield (at, fields[name], node)
        elif isinstance(written.additional_properties, Node):
            yield (at, written.additional_properties, node)
        if name in read.required and name not in written.required:
            yield Misfit(at, MisfitKind.MISSING, read=describe(node))
    for name in sorted(fields.keys() - read_fields.keys()):
        at = f"{path}.{name}".lstrip(".")
        if isinstance(read_others, Node):
            yield (at, fields[name], read_others)
        elif read_others is False:
            yield Misfit(at, MisfitKind.REFUSED, describe(fields[name]), "no field")
        elif read.properties is not None:
            alike = tuple(sorted(other for other, node in read_fields.items() if other not in fields and node == fields[name]))
            yield Misfit(at, MisfitKind.IGNORED, describe(fields[name]), alike=alike)
    if isinstance(read_others, Node) and written.properties is None:
        extra_fields = written.additional_properties
        yield (f"{path}{{}}", extra_fields if isinstance(extra_fields, Node) else ANY, read_others)


def _compare_arrays(path: str, written: Node, read: Node) -> Iterator[Misfit | _Part]:
    for index in range(max(len(written.prefix_items), len(read.prefix_items))):
        item, expected = _item(written, index), _item(read, index)
        if isinstance(item, Node) and isinstance(expected, Node):
            yield (f"{path}[{index}]", item, expected)
    if isinstance(read.items, Node) and written.items is not False:
        yield (f"{path}[]", written.items if isinstance(written.items, Node) else ANY, read.items)


def _item(node: Node, index: int) -> bool | Node:
    return node.prefix_items[index] if index < len(node.prefix_items) else node.items


def _is_limited(written: Node, read: Node) -> bool:
    """Return whether a reader has a limit that written values may exceed."""
    for name in EXACT:
        if (limit := getattr(read, name)) is not None and limit != getattr(written, name):
            return True
    for name, (_, is_least) in LIMITS.items():
        limit, given = getattr(read, name), getattr(written, name)
        if limit is not None and (given is None or (given < limit if is_least else given > limit)):
            return True
    return False


def _in_words(node: Node, schema: Schema) -> str:
    """Return a node in words: the values of an enum, the name of another class, or the type."""
    resolved = schema.resolve(node)
    return describe(node if resolved.enum is None else resolved)


def describe(node: Node) -> str:
    """Return a node in words: string (uuid), 'a', 'b', Place or null."""
    if node.ref == "#":
        return "the type itself"
    if node.ref is not None:
        return node.ref.removeprefix("#/$defs/")
    if node.any_of is not None:
        return " or ".join(dict.fromkeys(describe(option) for option in node.any_of))
    if node.enum is not None:
        return _listed(node.enum)
    words = [words.format(getattr(node, name)) for name, words in EXACT.items() if getattr(node, name) is not None]
    words += [words.format(getattr(node, name)) for name, (words, _) in LIMITS.items() if getattr(node, name) is not None]
    return " ".join([node.type or "anything", *([f"({', '.join(words)})"] if words else [])])


def _listed(values: list[Any]) -> str:
    shown = ", ".join("null" if value is None else repr(value) for value in values[:MAX_VALUES])
    return shown if len(values) <= MAX_VALUES else f"{shown} and {len(values) - MAX_VALUES} more"
