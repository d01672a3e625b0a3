"""Messages for the admin's pages to show."""

from collections.abc import Callable
from typing import Any

import pytest

from outbox.models import Topic
from tests.factories import BatchFactory, MessageRowFactory


@pytest.fixture
def message(orders: Topic) -> Callable[..., Any]:
    """Make a message that stands in a batch of its own."""

    def message(*, batch: dict[str, Any] | None = None, **fields: Any) -> Any:
        row = MessageRowFactory(topic=orders, **fields)
        if batch is not None:
            BatchFactory(topic=orders, message_ids=[row.id], **batch)
        return row

    return message
