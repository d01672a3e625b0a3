"""An order, and its commit in Django's own transaction."""

from typing import Any

from django.db import transaction

from outbox import Message, publish
from tests.outbox.publishing.rows import OrderMade

ORDER = OrderMade(order_id=1)


def commit(message: Message = ORDER, **options: Any) -> None:
    with transaction.atomic():
        publish(message, **options)
