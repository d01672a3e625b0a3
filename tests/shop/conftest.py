import json

import pytest

LINE = {"line": 2, "stock_code": "85123A", "description": "WHITE HANGING HEART", "quantity": "6", "unit_price": "2.55"}
INVOICE = {
    "invoice": "536365",
    "invoiced_at": "2010-12-01 08:26:00",
    "customer": "17850",
    "country": "United Kingdom",
    "lines": [LINE],
}


@pytest.fixture
def submit(client):
    """Submit an invoice to one of the shop's doors; return the answer. Lines are changes to a good one."""

    def submit(door, *lines, **changes):
        made = [{**LINE, "line": number, **line} for number, line in enumerate(lines or ({},), 2)]
        body = json.dumps({**INVOICE, "lines": made, **changes})
        return client.post(f"/shop/{door}/", body, content_type="application/json")

    return submit
