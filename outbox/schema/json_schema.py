"""The JSON Schema of message types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec
from msgspec import inspect

from outbox.errors import InvalidMessageType
from outbox.message import Message, prepare

DEFINITIONS = "#/$defs/{name}"


def values_of_enum(kind: type) -> list[Any]:
    """Return the values of an enum; [] for another type. (msgspec does not know enums with a metaclass, as Django's choices.)"""
    return [member.value for member in kind] if issubclass(kind, Enum) else []


def schema_of(kind: type[Message]) -> dict[str, Any]:
    """
    Return the schema of a message type's body, with the schemas of other classes in its `$defs`.

    Raises the same errors as `schemas_of`.
    """
    [schema], definitions = schemas_of([kind])
    return {**schema, "$defs": definitions} if definitions else schema


def schemas_of(
    kinds: Sequence[type[Message]], ref_template: str = DEFINITIONS
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """
    Return the schemas of message types, and the schemas of all classes that they refer to, by unique names.

    Datetimes and times have their format; msgspec omits it if the type allows values with and without a time zone.

    Args:
        ref_template: the text of a reference to the class `{name}`.

    Raises:
        InvalidMessageType: the annotations of a type cannot be read, or have a type that JSON cannot represent.
    """
    infos = [_info(kind) for kind in kinds]
    schemas, definitions = msgspec.json.schema_components(kinds, schema_hook=_schema_of_enum, ref_template=ref_template)
    _mark_times(zip(infos, schemas, strict=True), definitions)
    return list(schemas), definitions


def _schema_of_enum(kind: type) -> dict[str, Any]:
    """Return the schema of an enum for which msgspec has none, or raise NotImplementedError for any other type."""
    if values := values_of_enum(kind):
        return {"enum": values}
    raise NotImplementedError


def _info(kind: type[Message]) -> inspect.Type:
    subject = f"Message type {kind.__module__}.{kind.__qualname__}"
    try:
        prepare(kind)
        msgspec.json.schema(kind, schema_hook=_schema_of_enum)
        return inspect.type_info(kind)
    except RecursionError as error:
        raise InvalidMessageType(f"{subject} is nested too deeply.", hint="Divide it into smaller classes.") from error
    except Exception as error:  # TypeError, NameError, and any error that the evaluation of an annotation raises
        raise InvalidMessageType(
            f"{subject} cannot be described: {str(error).rpartition(chr(10))[2]}.",
            hint="Use a plain type such as int, str, Decimal, datetime, a list or a dict of them, or a dataclass.",
        ) from error


def _mark_times(roots: Iterable[tuple[inspect.Type, dict[str, Any]]], definitions: Mapping[str, dict[str, Any]]) -> None:
    """Add the format to nodes of datetimes and times for which msgspec has omitted it, so that they differ from other texts."""
    todo, seen = list(roots), set()
    while todo:
        kind, node = todo.pop()
        if "$ref" in node:
            name = node["$ref"].rpartition("/")[2]
            if name in seen:
                continue
            seen.add(name)
            node = definitions[name]
        if isinstance(kind, inspect.Metadata):
            todo.append((kind.type, node))
        elif isinstance(kind, inspect.DateTimeType | inspect.TimeType):
            node.setdefault("format", "date-time" if isinstance(kind, inspect.DateTimeType) else "time")
        elif isinstance(kind, inspect.UnionType):
            todo += zip(kind.types, node.get("anyOf", []), strict=False)
        elif isinstance(kind, inspect.DictType):
            todo.append((kind.value_type, node.get("additionalProperties") or {}))
        elif isinstance(kind, inspect.TupleType):
            todo += zip(kind.item_types, node.get("prefixItems", []), strict=False)
        elif isinstance(item := getattr(kind, "item_type", None), inspect.Type):
            todo.append((item, node.get("items") or {}))
        else:
            fields = getattr(kind, "fields", ())
            if "prefixItems" in node:
                todo += zip([field.type for field in fields], node["prefixItems"], strict=False)
            else:
                todo += [(field.type, node.get("properties", {}).get(field.encode_name, {})) for field in fields]


def nodes(root: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all nodes of a schema, each after those that contain it."""
    found, todo = [], [root]
    while todo:
        node = todo.pop()
        found.append(node)
        for name in ("properties", "$defs"):
            todo += node.get(name, {}).values()
        for name in ("anyOf", "prefixItems"):
            todo += node.get(name, ())
        todo += [node[name] for name in ("items", "additionalProperties") if isinstance(node.get(name), dict)]
    return found
