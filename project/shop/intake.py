"""Parse and validate orders and cancellations: the shop accepts some lines, and refuses others with a reason."""

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
    """A submitted line, not validated yet. `line` is its number in the input."""

    line: int
    stock_code: str
    description: str
    quantity: str
    unit_price: str


class SubmittedInvoice(msgspec.Struct, frozen=True):
    """A submitted order or cancellation, not validated yet. `customer` is empty for a guest."""

    invoice: str
    invoiced_at: str
    country: str
    lines: list[SubmittedLine]
    customer: str = ""
    payment: str = "card"


class ShopError(Exception):
    """Raised when the shop rejects a request. `status` is the HTTP status of the response."""

    status = 400


class NotAccepted(ShopError):
    """Raised when a whole invoice is rejected."""

    status = 422


class AlreadyKnown(ShopError):
    """Raised when an invoice with this number already exists."""

    status = 409


@dataclass(frozen=True, slots=True)
class AcceptedLine:
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
    """A refused line, and the reason."""

    line: SubmittedLine
    reason: str


@dataclass(frozen=True, slots=True)
class Validated:
    """The result of validating an invoice."""

    invoiced_at: datetime
    accepted: list[AcceptedLine]
    refused: list[RefusedLine]

    @property
    def total(self) -> Decimal:
        return sum((line.amount for line in self.accepted), Decimal(0))


def read_invoice(body: bytes) -> SubmittedInvoice:
    """
    Parse the body of a request.

    Raises:
        ShopError: it is not the JSON of an invoice; the text names the wrong field.
    """
    try:
        return msgspec.json.decode(body, type=SubmittedInvoice)
    except msgspec.DecodeError as error:
        raise ShopError(f"The request is not an invoice: {error}.") from error


def validate(submitted: SubmittedInvoice, *, cancels: bool) -> Validated:
    """
    Separate the accepted lines of an order or a cancellation from the refused ones.

    Args:
        cancels: whether the invoice has to be a cancellation.

    Raises:
        NotAccepted: the invoice's number or date is wrong, so that no line can be accepted.
    """
    number = INVOICE_NUMBER.fullmatch(submitted.invoice)
    if number is None or bool(number["cancels"]) is not cancels:
        wanted = "C and 6 to 10 digits" if cancels else "6 to 10 digits"
        raise NotAccepted(f"invoice number {submitted.invoice!r} is not {wanted}")
    invoiced_at = _read_time(submitted.invoiced_at)
    accepted, refused = [], []
    for line in submitted.lines:
        try:
            accepted.append(_validate_line(line, cancels=cancels))
        except ValueError as error:
            refused.append(RefusedLine(line, str(error)))
    return Validated(invoiced_at, accepted, refused)


def _read_time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise NotAccepted(f"date {text!r} is not of the form 2010-12-01 08:26:00") from error
    return time if time.tzinfo else time.replace(tzinfo=SHOP_TIME)


def _validate_line(line: SubmittedLine, *, cancels: bool) -> AcceptedLine:
    """
    Return the accepted line.

    Raises:
        ValueError: the line is refused; the text is the reason.
    """
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
    return AcceptedLine(line.stock_code, line.description, abs(quantity), price)


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
