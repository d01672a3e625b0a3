"""Rows that messages may be about, with keys of other kinds than a number."""

import os
import time
from typing import Any
from uuid import UUID

from django.db import models

from tests.setups.shop.models import Order

LETTERS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def new_ulid() -> str:
    return as_ulid(UUID(int=int(time.time() * 1000) << 80 | int.from_bytes(os.urandom(10), "big")))


def as_ulid(key: UUID) -> str:
    return "".join(LETTERS[key.int >> shift & 31] for shift in range(125, -1, -5))


class UlidField(models.UUIDField):
    """A ULID in Python, and a UUID in the database."""

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> str | None:
        return value and as_ulid(value)

    def to_python(self, value: Any) -> Any:
        return value if value is None or len(str(value)) == 26 else as_ulid(UUID(str(value)))

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        number = sum(LETTERS.index(letter) << shift for letter, shift in zip(value, range(125, -1, -5), strict=True))
        return super().get_db_prep_value(UUID(int=number), connection, prepared)


class Gift(Order):
    """An order whose key is that of its parent's row."""

    greeting = models.TextField(default="Hello")


class Parcel(models.Model):
    id = UlidField(primary_key=True, default=new_ulid)
    order = models.ForeignKey(Order, models.CASCADE)

    def __str__(self) -> str:
        return f"Parcel {self.pk}"


def gift_of(order: Order) -> Gift:
    gift = Gift(order_ptr=order, points=order.points)
    gift.save()
    return gift


def parcel_of(order: Order) -> Parcel:
    return Parcel.objects.create(order=order)
