"""Enums as Django's models have them, for fields of messages."""

from django.db.models import IntegerChoices, TextChoices


class OrderState(TextChoices):
    NEW = "new", "New"
    PAID = "paid", "Paid"


class Stars(IntegerChoices):
    ONE = 1
    TWO = 2
