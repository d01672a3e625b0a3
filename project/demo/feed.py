"""Sends a day of orders to the shop over HTTP, like its customers."""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from project.demo.processes import DemoError
from project.shop.orders_file import Invoice

DECLINED_SHARE = 0.1  # the share of orders whose payment is declined, after their message was published
ANSWER_SECONDS = 30
EXPECTED = {201, 402, 422}  # accepted, payment declined, no line accepted


class Feed:
    """
    The orders of a day, one after the other.

    Args:
        url: the shop's URL, such as `http://127.0.0.1:8000`.
        seed: chooses the orders whose payment is declined.
    """

    def __init__(self, url: str, invoices: Sequence[Invoice], seed: int) -> None:
        self.url = url
        self.invoices = invoices
        self.sent = 0
        orders = [invoice.number for invoice in invoices if not invoice.is_cancellation]
        chosen = random.Random(seed).sample(orders, round(len(orders) * DECLINED_SHARE))  # noqa: S311
        self.declined = frozenset(chosen)

    @property
    def is_empty(self) -> bool:
        return self.sent == len(self.invoices)

    def send_next(self) -> None:
        """
        Send the next invoice.

        Raises:
            DemoError: the shop did not answer, or with an unexpected status.
        """
        invoice = self.invoices[self.sent]
        self.sent += 1
        if invoice.is_cancellation:
            self._post("cancellations", submission(invoice))
            return
        self._post("cart", {"invoice": invoice.number, "items": len(invoice.rows)})
        payment = "declined" if invoice.number in self.declined else "card"
        self._post("orders", {**submission(invoice), "payment": payment})

    def _post(self, path: str, content: dict[str, Any]) -> None:
        request = urllib.request.Request(  # noqa: S310  (always http)
            f"{self.url}/shop/{path}/", json.dumps(content).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:  # noqa: S310
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        except OSError as error:
            raise DemoError(f"The shop did not answer to {path} {content['invoice']}: {error}.") from error
        if status not in EXPECTED:
            raise DemoError(f"The shop answered {status} to {path} {content['invoice']}: {text[:300].decode(errors='replace')}")


def submission(invoice: Invoice) -> dict[str, Any]:
    """Return an invoice as JSON for the shop's views."""
    return {
        "invoice": invoice.number,
        "invoiced_at": invoice.invoiced_at,
        "customer": invoice.customer,
        "country": invoice.country,
        "lines": [
            {
                "line": row.line,
                "stock_code": row.stock_code,
                "description": row.description,
                "quantity": row.quantity,
                "unit_price": row.unit_price,
            }
            for row in invoice.rows
        ],
    }
