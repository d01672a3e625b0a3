"""Validation of orders: which lines the shop accepts, and why it rejects the others."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal, InvalidOperation
from zoneinfo import ZoneInfo

import msgspec

SHOP_TIME = ZoneInfo("Europe/London")  # invoices carry the local time of the shop

INVOICE_NUMBER = re.compile(r"(?P<cancels>C?)[0-9]{6,10}")
MAX_QUANTITY = 1_000_000
MAX_PRICE = Decimal(1_000_000)


class SubmittedLine(msgspec.Struct, frozen=True):
    """A line as submitted: text, not validated yet. `line`: its number in the input."""

    line: int
    stock_code: str
    description: str
    quantity: str
    unit_price: str


class SubmittedInvoice(msgspec.Struct, frozen=True):
    """An order or a cancellation as submitted. `customer` is empty for a guest."""

    invoice: str
    invoiced_at: str
    country: str
    lines: list[SubmittedLine]
    customer: str = ""
    payment: str = "card"


class ShopError(Exception):
    """Raised when the shop rejects a request. `status`: the HTTP status."""

    status = 400


class NotAccepted(ShopError):
    """Raised when a whole invoice is rejected."""

    status = 422


class AlreadyKnown(ShopError):
    """Raised when an invoice with this number already exists."""

    status = 409


@dataclass(frozen=True, slots=True)
class GoodLine:
    """An accepted line. `quantity` is positive, also on a cancellation."""

    stock_code: str
    description: str
    quantity: int
    unit_price: Decimal

    @property
    def amount(self) -> Decimal:
        return self.quantity * self.unit_price


@dataclass(frozen=True, slots=True)
class RefusedLine:
    """A rejected line, and the reason."""

    line: SubmittedLine
    reason: str


@dataclass(frozen=True, slots=True)
class Judged:
    """The result of validating an invoice."""

    invoiced_at: datetime
    good: list[GoodLine]
    refused: list[RefusedLine]

    @property
    def total(self) -> Decimal:
        return sum((line.amount for line in self.good), Decimal(0))


def read_invoice(body: bytes) -> SubmittedInvoice:
    """Parse a request's body. Raises ShopError, which names the field, if it is not valid JSON of an invoice."""
    try:
        return msgspec.json.decode(body, type=SubmittedInvoice)
    except msgspec.DecodeError as error:
        raise ShopError(f"The request is not an invoice: {error}.") from error


def judge(submitted: SubmittedInvoice, *, cancels: bool) -> Judged:
    """
    Part the good lines of an order or a cancellation from those that are refused.

    Raises:
        NotAccepted: number or date are wrong, so that no line can be accepted.
    """
    number = INVOICE_NUMBER.fullmatch(submitted.invoice)
    if number is None or bool(number["cancels"]) is not cancels:
        wanted = "C and 6 to 10 digits" if cancels else "6 to 10 digits"
        raise NotAccepted(f"invoice number {submitted.invoice!r} is not {wanted}")
    invoiced_at = _read_time(submitted.invoiced_at)
    good, refused = [], []
    for line in submitted.lines:
        try:
            good.append(_judge_line(line, cancels=cancels))
        except ValueError as error:
            refused.append(RefusedLine(line, str(error)))
    return Judged(invoiced_at, good, refused)


def _read_time(text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise NotAccepted(f"date {text!r} is not of the form 2010-12-01 08:26:00") from error
    return found if found.tzinfo else found.replace(tzinfo=SHOP_TIME)


def _judge_line(line: SubmittedLine, *, cancels: bool) -> GoodLine:
    """Return an accepted line. Raises ValueError with the reason if it is rejected."""
    quantity, price = _read_quantity(line.quantity), _read_price(line.unit_price)
    if not line.stock_code:
        raise ValueError("no stock code")
    if price == 0 and not line.description:
        raise ValueError("no description and price 0: a stock correction, not a sale")
    if price <= 0:
        raise ValueError(f"price {line.unit_price}: nothing is sold for that")
    if cancels and quantity >= 0:
        raise ValueError(f"quantity {quantity} on a cancellation: it must be negative")
    if not cancels and quantity <= 0:
        raise ValueError(f"quantity {quantity} on an order: it must be positive, only a cancellation gives back")
    return GoodLine(line.stock_code, line.description, abs(quantity), price)


def _read_quantity(text: str) -> int:
    try:
        quantity = int(text)
    except ValueError as error:
        raise ValueError(f"quantity {text!r} is not a whole number") from error
    if abs(quantity) > MAX_QUANTITY:
        raise ValueError(f"quantity {text} is beyond {MAX_QUANTITY:,}")
    return quantity


def _read_price(text: str) -> Decimal:
    try:
        price = Decimal(text)
    except InvalidOperation as error:
        raise ValueError(f"price {text!r} is not a number") from error
    if not price.is_finite() or abs(price) > MAX_PRICE:
        raise ValueError(f"price {text} is beyond {MAX_PRICE:,}")
    if price != price.quantize(Decimal("0.01")):
        raise ValueError(f"price {text} has fractions of a penny")
    return price
