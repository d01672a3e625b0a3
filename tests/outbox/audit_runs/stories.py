"""Messages on their real way: published, relayed, handled."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from outbox import publish_raw, transaction
from outbox.consumer.register import group
from outbox.consumer.run import Worker
from outbox.models import Inbox
from outbox.relay import host


def relay(count: int) -> list[Any]:
    """Publish so many orders and relay all that waits; give their ids."""
    ids = []
    for _ in range(count):
        with transaction():
            ids.append(publish_raw("orders", {}).message_id)
    host.visit(host.Post("default", "default"), note="test", at_most=host.LINGER * 100, linger=host.NO_LINGER)
    return ids


def handle(name: str) -> int:
    """Have a group handle what waits for it; say how many messages it had not handled before."""
    before = Inbox.objects.filter(consumer_group=name).count()
    with closing(Worker(group(name), "default")) as worker:
        worker.run(until_idle=True, seconds=30)
    return Inbox.objects.filter(consumer_group=name).count() - before
