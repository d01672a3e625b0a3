"""
Read a file of orders in the format of the Online Retail data set, plain or gzipped.

The reader checks the format only, and groups lines into invoices. The shop validates the lines, and refuses some with a reason.
Source: project/shop/data/SOURCE.md.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

DAY = Path(__file__).parent / "data" / "online-retail-2010-12-01.csv"

COLUMNS = [
    "InvoiceNo",
    "StockCode",
    "Description",
    "Quantity",
    "InvoiceDate",
    "UnitPrice",
    "CustomerID",
    "Country",
]


class OrdersFileError(Exception):
    """Raised when a file does not have the format; the text names file and line."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of an invoice, as in the file. `line` is its number in the file, where the header is line 1."""

    line: int
    stock_code: str
    description: str
    quantity: str
    unit_price: str


@dataclass(frozen=True, slots=True)
class Invoice:
    """An invoice, as in the file; date, customer and country are those of its first line."""

    number: str
    invoiced_at: str
    customer: str
    country: str
    rows: list[Row] = field(default_factory=list)

    @property
    def is_cancellation(self) -> bool:
        return self.number.startswith("C")


def read_orders(path: Path) -> list[Invoice]:
    """
    Read all invoices of a `.csv` or `.csv.gz` file, in the order of their first lines.

    Raises:
        OrdersFileError: the file is missing, is not UTF-8 text, has no orders, or a line does not have the columns.
    """
    invoices: dict[str, Invoice] = {}
    try:
        with _open(path) as file:
            for line, record in _records(path, file):
                _add(invoices, path, line, record)
    except (OSError, EOFError, zlib.error) as error:
        raise OrdersFileError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    except UnicodeDecodeError as error:
        raise OrdersFileError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}. Convert it.") from error
    if not invoices:
        raise OrdersFileError(f"{path} has a header and no orders.")
    return list(invoices.values())


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _records(path: Path, file: TextIO) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(file, strict=True)
    try:
        header = next(reader, None)
        if header is None:
            raise OrdersFileError(f"{path} is empty. Its first line must be {','.join(COLUMNS)}.")
        if header != COLUMNS:
            raise OrdersFileError(f"{path} line 1: the columns must be {','.join(COLUMNS)}, not {','.join(header)}.")
        for record in reader:
            if len(record) != len(COLUMNS):
                raise OrdersFileError(f"{path} line {reader.line_num}: {len(record)} columns instead of {len(COLUMNS)}.")
            yield reader.line_num, record
    except csv.Error as error:
        raise OrdersFileError(f"{path} line {reader.line_num}: {error}.") from error


def _add(invoices: dict[str, Invoice], path: Path, line: int, record: list[str]) -> None:
    number, stock_code, description, quantity, date, price, customer, country = record
    customer = customer.removesuffix(".0")  # the data set has it as a decimal number
    invoice = invoices.setdefault(number, Invoice(number, date, customer, country))
    if invoice.customer != customer:
        raise OrdersFileError(
            f"{path} line {line}: invoice {number} is of customer {customer or 'none'} here, and of "
            f"{invoice.customer or 'none'} in line {invoice.rows[0].line}."
        )
    invoice.rows.append(Row(line, stock_code, description.strip(), quantity, price))
