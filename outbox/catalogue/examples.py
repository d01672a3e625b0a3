"""Make an example of a message type's body from its annotations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import inspect

from outbox.message import Message, prepare
from outbox.schema.json_schema import values_of_enum

MAX_LEVELS = 5  # levels of nesting; deeper values are left out if they are not required

# Type without constraints -> an example as JSON.
VALUES: dict[type[inspect.Type], Any] = {
    inspect.AnyType: None,
    inspect.NoneType: None,
    inspect.BoolType: True,
    inspect.BytesType: "AAEC",
    inspect.ByteArrayType: "AAEC",
    inspect.MemoryViewType: "AAEC",
    inspect.DateTimeType: "2026-01-31T12:30:00Z",
    inspect.DateType: "2026-01-31",
    inspect.TimeType: "12:30:00",
    inspect.TimeDeltaType: "P1D",
    inspect.UUIDType: "0190c1f8-0000-7000-8000-000000000000",
    inspect.DecimalType: "1.50",
}


def example(kind: type[Message]) -> dict[str, Any] | None:
    """
    Return a valid body of a message type, as JSON; None if none could be made that fits the type's constraints.

    The value of a field is the first example in `msgspec.Meta`; without examples, the field's default; and otherwise a value of
    its type.
    """
    prepare(kind)
    try:
        example: dict[str, Any] = _of(inspect.type_info(kind), 0)
        msgspec.convert(example, kind)
    except (msgspec.ValidationError, _NoExample):
        return None
    return example


class _NoExample(Exception):
    """Raised for a type for which no value can be made."""


def _of(kind: inspect.Type, level: int) -> Any:
    if type(kind) in VALUES:
        return VALUES[type(kind)]
    if isinstance(kind, inspect.Metadata):
        examples = (kind.extra_json_schema or {}).get("examples", [])
        return examples[0] if examples else _of(kind.type, level)
    for types, make in _MAKERS:
        if isinstance(kind, types):
            return make(kind, level)
    raise _NoExample(kind)


def _number(kind: Any, level: int) -> int | float:
    """Return a number within the limits, 1 if possible."""
    lowest = kind.ge if kind.ge is not None else None if kind.gt is None else kind.gt + 1
    highest = kind.le if kind.le is not None else None if kind.lt is None else kind.lt - 1
    number: int | float = 1 if lowest is None else max(1, lowest)
    number = number if highest is None else min(number, highest)
    return number if kind.multiple_of is None else max(1, round(number / kind.multiple_of)) * kind.multiple_of


def _text(kind: Any, level: int) -> str:
    text = "text"
    if kind.min_length is not None:
        text = text.ljust(kind.min_length, "x")
    return text if kind.max_length is None else text[: kind.max_length]


def _choice_of_django(kind: Any, level: int) -> Any:
    for value in values_of_enum(kind.cls):
        return value
    raise _NoExample(kind)


def _union(kind: Any, level: int) -> Any:
    """Return a value of the first type that is not None; at a deep level None if possible, so that recursive types end."""
    not_none = [type_ for type_ in kind.types if not isinstance(type_, inspect.NoneType)]
    if level >= MAX_LEVELS and len(not_none) < len(kind.types):
        return None
    return _of(not_none[0], level)


def _items(kind: Any, level: int) -> list[Any]:
    if level >= MAX_LEVELS and not kind.min_length:
        return []
    return [_of(kind.item_type, level + 1) for _ in range(max(1, kind.min_length or 1))]


def _mapping(kind: Any, level: int) -> dict[Any, Any]:
    if level >= MAX_LEVELS and not kind.min_length:
        return {}
    return {_of(kind.key_type, level + 1): _of(kind.value_type, level + 1)}


def _fields(kind: Any, level: int) -> dict[str, Any]:
    if level > 2 * MAX_LEVELS:
        raise _NoExample(kind)
    values = {}
    for field in kind.fields:
        if level >= MAX_LEVELS and not field.required:
            continue
        has_examples = isinstance(field.type, inspect.Metadata) and "examples" in (field.type.extra_json_schema or {})
        if has_examples or field.default in (msgspec.NODEFAULT, None):
            values[field.encode_name] = _of(field.type, level + 1)
        else:
            values[field.encode_name] = msgspec.to_builtins(field.default, str_keys=True)
    if getattr(kind, "tag_field", None):
        values = {kind.tag_field: kind.tag} | values
    return values


_MAKERS: list[tuple[Any, Callable[[Any, int], Any]]] = [
    ((inspect.IntType, inspect.FloatType), _number),
    (inspect.StrType, _text),
    (inspect.EnumType, lambda kind, level: next(iter(kind.cls)).value),
    (inspect.LiteralType, lambda kind, level: kind.values[0]),
    (inspect.CustomType, _choice_of_django),
    (inspect.UnionType, _union),
    ((inspect.ListType, inspect.SetType, inspect.FrozenSetType, inspect.VarTupleType), _items),
    (inspect.TupleType, lambda kind, level: [_of(item_type, level + 1) for item_type in kind.item_types]),
    (inspect.DictType, _mapping),
    ((inspect.StructType, inspect.TypedDictType, inspect.DataclassType), _fields),
]
