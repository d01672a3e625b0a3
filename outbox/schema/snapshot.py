"""The snapshot: name, version, upgrades, topic, key, tag and schema of each message type, as a file with one fact per line."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from outbox.errors import UnreadableSnapshot
from outbox.message import Message
from outbox.schema.json_schema import nodes, schema_of

FORMAT = 1

_CONFLICT = re.compile(r"^(<{7}|\|{7}|={7}|>{7})", re.MULTILINE)
_WRITE = "Restore it from your repository, then run manage.py outbox_schema --write."


class Node(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """
    A node of a JSON Schema, with the keywords that decide which bodies are accepted: no titles, descriptions and defaults.

    Source: JSON Schema 2020-12; only keywords that msgspec writes.
    """

    ref: str | None = msgspec.field(default=None, name="$ref")
    type: str | None = None
    enum: list[Any] | None = None
    any_of: list[Node] | None = None
    format: str | None = None
    content_encoding: str | None = None
    pattern: str | None = None
    properties: dict[str, Node] | None = None
    required: list[str] = []
    additional_properties: bool | Node = True
    min_properties: int | None = None
    max_properties: int | None = None
    items: bool | Node = True
    prefix_items: list[Node] = []
    min_items: int | None = None
    max_items: int | None = None
    min_length: int | None = None
    max_length: int | None = None
    minimum: int | float | None = None
    exclusive_minimum: int | float | None = None
    maximum: int | float | None = None
    exclusive_maximum: int | float | None = None
    multiple_of: int | float | None = None


class Schema(Node, frozen=True, omit_defaults=True, rename="camel"):
    """The schema of a message type, with the schemas of the classes that its fields refer to."""

    definitions: dict[str, Node] = msgspec.field(default_factory=dict, name="$defs")

    def resolve(self, node: Node) -> Node:
        """Return the node to which a node refers, or the node itself if it is no reference."""
        while node.ref is not None:
            node = self if node.ref == "#" else self.definitions[node.ref.removeprefix("#/$defs/")]
        return node


class TypeSnapshot(msgspec.Struct, frozen=True):
    """
    A message type in a snapshot.

    Args:
        upgrades: the older versions that have an upgrade.
    """

    version: int
    topic: str
    key: str
    upgrades: list[int]
    schema: Schema
    tag: str = ""


class Snapshot(msgspec.Struct, frozen=True):
    """All message types, by their names on the wire."""

    types: dict[str, TypeSnapshot] = {}
    format: int = FORMAT


def take(types: Mapping[str, type[Message]]) -> Snapshot:
    """
    Return a snapshot of message types.

    Raises:
        InvalidMessageType: the annotations of a type cannot be read, or have a type that JSON cannot represent.
    """
    snapshots = {}
    for name, kind in types.items():
        meta = kind._meta
        schema = _in_order(schema_of(kind))
        snapshots[name] = TypeSnapshot(meta.version, meta.topic, meta.key, sorted(kind._upgrades), schema, meta.tag)
    return Snapshot(snapshots)


def _in_order(written: dict[str, Any]) -> Schema:
    """Return the schema in a fixed order. The type itself is the root and not a definition, since its class may be renamed."""
    definitions = written.pop("$defs", {})
    root = written
    if (root_name := written.get("$ref", "").removeprefix("#/$defs/")) in definitions:
        root = definitions.pop(root_name)
        for node in nodes({**root, "$defs": definitions}):
            if node.get("$ref") == f"#/$defs/{root_name}":
                node["$ref"] = "#"
    for node in nodes({**root, "$defs": definitions}):
        for name in ("anyOf", "enum", "required"):
            if name in node:
                node[name].sort(key=lambda part: json.dumps(part, sort_keys=True))
    return msgspec.convert({**root, "$defs": definitions}, Schema)


def read(path: Path) -> Snapshot:
    """
    Read a snapshot from a file; return an empty one if the file does not exist.

    Raises:
        UnreadableSnapshot: the file cannot be read, has conflict markers, or is not a snapshot.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Snapshot()
    except OSError as error:
        raise _file_error(path, "read", error) from error
    except UnicodeDecodeError as error:
        raise UnreadableSnapshot(f"{path} is not a text in UTF-8.", hint=_WRITE) from error
    if conflict := _CONFLICT.search(text):
        raise UnreadableSnapshot(
            f"{path} has the conflict marker {conflict[1]} in line {text.count(chr(10), 0, conflict.start()) + 1}.",
            hint="Keep the side of the branch that is released first, then run manage.py outbox_schema --check, then --write.",
        )
    try:
        snapshot = msgspec.json.decode(text, type=Snapshot)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UnreadableSnapshot(f"{path} is not a snapshot: {error}.", hint=_WRITE) from error
    if snapshot.format != FORMAT:
        raise UnreadableSnapshot(
            f"{path} has the format {snapshot.format}, but this release reads only {FORMAT}.",
            hint="Install the release that wrote the file.",
        )
    for name, type_ in snapshot.types.items():
        _require_definitions(path, name, type_.schema)
    return snapshot


def _require_definitions(path: Path, name: str, schema: Schema) -> None:
    for defined, node in schema.definitions.items():
        if node.ref is not None:
            raise UnreadableSnapshot(f"{path} is not a snapshot: {defined!r} of {name} is only a reference.", hint=_WRITE)
    for part in nodes(msgspec.to_builtins(schema)):
        ref = part.get("$ref")
        if ref not in (None, "#") and ref.removeprefix("#/$defs/") not in schema.definitions:
            raise UnreadableSnapshot(f"{path} is not a snapshot: {name} refers to {ref!r}, which is not defined.", hint=_WRITE)


def as_text(snapshot: Snapshot) -> str:
    """Return the text of a snapshot. It is sorted and has one fact per line, so that two branches rarely change the same line."""
    return msgspec.json.format(msgspec.json.encode(snapshot, order="sorted"), indent=2).decode() + "\n"


def write(path: Path, snapshot: Snapshot) -> bool:
    """
    Write a snapshot to a file; return False if the file already has it.

    Raises:
        UnreadableSnapshot: the file cannot be written.
    """
    text = as_text(snapshot)
    try:
        if path.exists() and path.read_bytes() == text.encode():
            return False
        path.write_bytes(text.encode())
    except OSError as error:
        raise _file_error(path, "written", error) from error
    return True


def _file_error(path: Path, action: str, error: OSError) -> UnreadableSnapshot:
    return UnreadableSnapshot(
        f"{path} cannot be {action}: {error.strerror or error}.",
        hint="Correct its permissions, or name another file with --file.",
    )
