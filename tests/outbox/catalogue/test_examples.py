from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
import pytest
from django.db.models import TextChoices

from outbox import Message, message
from outbox.catalogue.examples import example


class Size(Enum):
    SMALL = "S"
    LARGE = "L"


class OrderState(TextChoices):
    NEW = "new", "New"


@dataclass
class Address:
    street: str
    lines: list[str]


class Node(msgspec.Struct):
    name: str
    parent: Node | None = None
    children: list[Node] = []


class Tree(msgspec.Struct):
    """It has no end."""

    left: Tree


@pytest.fixture(autouse=True)
def _forget_types() -> Iterator[None]:
    before = dict(message.registered)
    yield
    message.registered.clear()
    message.registered.update(before)


def declare(annotation: Any, *default: Any) -> type[Message]:
    meta = type("Meta", (), {"topic": "orders"})
    names = {
        "__annotations__": {"it": annotation},
        "Meta": meta,
        "__module__": __name__,
        **dict(zip(("it",), default, strict=False)),
    }
    return type(Message)("Made", (Message,), names)


class TestAnExample:
    @pytest.mark.parametrize(
        "annotation",
        [
            *(int, float, str, bool, bytes, Decimal, UUID, datetime, date, time, timedelta, Any, None),
            *(
                Size,
                OrderState,
                Address,
                Node,
                Literal["a", "b"],
                list[int],
                dict[str, Decimal],
                tuple[int, str],
                set[str],
                int | None,
            ),
            *(tuple[int, ...], frozenset[int], Annotated[int, msgspec.Meta(ge=7, le=9)], Annotated[int, msgspec.Meta(lt=-3)]),
            *(Annotated[int, msgspec.Meta(multiple_of=5)], Annotated[str, msgspec.Meta(min_length=9, max_length=12)]),
            Annotated[str, msgspec.Meta(pattern="^[A-Z]{3}$", examples=["EUR"])],
        ],
    )
    def test_can_be_read_by_consumers(self, annotation):
        kind = declare(annotation)

        body = json.dumps(example(kind)).encode()

        assert isinstance(kind.from_body(body), kind)

    def test_has_the_examples_and_defaults_of_the_type(self):
        assert example(declare(Annotated[str, msgspec.Meta(examples=["EUR", "CHF"])], "USD")) == {"it": "EUR"}
        assert example(declare(str, "USD")) == {"it": "USD"}
        assert example(declare(int | None, None)) == {"it": 1}

    @pytest.mark.parametrize("annotation", [Annotated[str, msgspec.Meta(pattern="^[A-Z]{3}$")], Tree])
    def test_is_none_where_no_value_is_known(self, annotation):
        assert example(declare(annotation)) is None
