"""Compare two schemas: which bodies that are written by one does a reader of the other refuse, or lose a part of?"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

import msgspec

from outbox.schema.snapshot import Node, Schema

SHOWN = 5  # values of an enum in a text

ANY = Node()

# Type of a value in Python -> types of nodes that accept it.
TYPES: dict[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    type(None): ("null",),
}

# Keyword -> its words, and whether a reader of a greater value refuses more.
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

# Keywords whose values have to be equal.
EXACT = {"format": "{}", "content_encoding": "{}", "pattern": "like {}", "multiple_of": "a multiple of {}"}


class MisfitKind(enum.Enum):
    """How a body does not fit."""

    REFUSED = enum.auto()  # its value is not accepted
    MISSING = enum.auto()  # a field that the reader requires may be missing
    IGNORED = enum.auto()  # it has a field that the reader does not know


class Misfit(msgspec.Struct, frozen=True):
    """
    A part of a body that a reader refuses or does not know.

    Args:
        path: the field, such as `address.street` or `lines[].price`; "" for the body itself.
        written, read: what each side has there, in words.
        alike: with IGNORED, the fields beside it that only the reader knows and whose schema is the same.
    """

    path: str
    kind: MisfitKind
    written: str = ""
    read: str = ""
    alike: tuple[str, ...] = ()


def misfits(written: Schema, read: Schema) -> list[Misfit]:
    """Return what of the bodies of one schema does not fit a reader of another one."""
    by_place: dict[tuple[str, MisfitKind], Misfit] = {}
    for misfit in _Comparison(written, read).run(written, read):
        by_place.setdefault((misfit.path, misfit.kind), misfit)
    return list(by_place.values())


_Part = tuple[str, Node, Node]
"""A path, and what is written and read there: two nodes that are to be compared."""


class _Comparison(msgspec.Struct):
    """Walks two schemas side by side. Each pair of nodes is looked at once, so recursive types end."""

    writer: Schema
    reader: Schema
    fitting: dict[tuple[int, int], bool] = msgspec.field(default_factory=dict)

    def run(self, written: Node, read: Node) -> Iterator[Misfit]:
        todo: list[_Part] = [("", written, read)]
        seen = set()
        while todo:
            part = todo.pop()
            key = id(self.writer.resolve(part[1])), id(self.reader.resolve(part[2]))
            if key not in seen:
                seen.add(key)
                for misfit in self._compare(*part):
                    if isinstance(misfit, tuple):
                        todo.append(misfit)
                    else:
                        yield misfit

    def _fits(self, written: Node, read: Node) -> bool:
        key = id(self.writer.resolve(written)), id(self.reader.resolve(read))
        if key not in self.fitting:
            self.fitting[key] = True  # where the types are recursive, and nothing else is found
            self.fitting[key] = next(self.run(written, read), None) is None
        return self.fitting[key]

    def _compare(self, path: str, written: Node, read: Node) -> Iterator[Misfit | _Part]:
        """Compare each alternative that is written with those that are read."""
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
        """Return whether a node accepts a value of an enum, as far as its type says."""
        node = self.reader.resolve(choice)
        if node.enum is not None:
            return any(value == allowed and type(value) is type(allowed) for allowed in node.enum)
        return node == ANY or node.type in TYPES.get(type(value), ())


def _is_alike(written: Node, read: Node) -> bool:
    """Return whether two nodes have the same type and, if they are classes with a tag, the same one."""
    if read.enum is not None or (written.type != read.type and (written.type, read.type) != ("integer", "number")):
        return False
    pairs = [
        (node, (read.properties or {})[name])
        for name, node in (written.properties or {}).items()
        if name in (read.properties or {})
    ]
    tags = [(left.enum, other.enum) for left, other in pairs if left.enum is not None and other.enum is not None]
    return all(any(value in other for value in left) for left, other in tags)


def _compare_alike(path: str, written: Node, read: Node) -> Iterator[Misfit | _Part]:
    if _is_limited(written, read):
        yield Misfit(path, MisfitKind.REFUSED, describe(written), describe(read))
    elif read.type == "object":
        yield from _compare_objects(path, written, read)
    elif read.type == "array":
        yield from _compare_arrays(path, written, read)


def _compare_objects(path: str, written: Node, read: Node) -> Iterator[Misfit | _Part]:
    has, knows = written.properties or {}, read.properties or {}
    others = read.additional_properties
    for name, node in knows.items():
        at = f"{path}.{name}".lstrip(".")
        if name in has:
            yield (at, has[name], node)
        elif isinstance(written.additional_properties, Node):
            yield (at, written.additional_properties, node)
        if name in read.required and name not in written.required:
            yield Misfit(at, MisfitKind.MISSING, read=describe(node))
    for name in sorted(has.keys() - knows.keys()):
        at = f"{path}.{name}".lstrip(".")
        if isinstance(others, Node):
            yield (at, has[name], others)
        elif others is False:
            yield Misfit(at, MisfitKind.REFUSED, describe(has[name]), "no field")
        elif read.properties is not None:
            alike = tuple(sorted(other for other, node in knows.items() if other not in has and node == has[name]))
            yield Misfit(at, MisfitKind.IGNORED, describe(has[name]), alike=alike)
    if isinstance(others, Node) and written.properties is None:
        given = written.additional_properties
        yield (f"{path}{{}}", given if isinstance(given, Node) else ANY, others)


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
    """Return whether a reader has a limit that the writer's values may exceed."""
    for name in EXACT:
        if (limit := getattr(read, name)) is not None and limit != getattr(written, name):
            return True
    for name, (_, is_least) in LIMITS.items():
        limit, given = getattr(read, name), getattr(written, name)
        if limit is not None and (given is None or (given < limit if is_least else given > limit)):
            return True
    return False


def _in_words(node: Node, schema: Schema) -> str:
    """Return the values of an enum, the name of another class, or the type."""
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
    shown = ", ".join("null" if value is None else repr(value) for value in values[:SHOWN])
    return shown if len(values) <= SHOWN else f"{shown} and {len(values) - SHOWN} more"
