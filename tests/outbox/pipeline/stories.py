"""Messages on their real way: published, relayed, handled."""

from contextlib import closing
from typing import Any

from outbox import atomic, publish_raw
from outbox.consuming.register import group
from outbox.consuming.worker import Worker
from outbox.models import Inbox
from outbox.relay import hosts


def relay(count: int) -> list[Any]:
    """Publish so many orders and relay all that waits; return their ids."""
    ids = []
    for _ in range(count):
        with atomic():
            ids.append(publish_raw("orders", {}).message_id)
    hosts.run_once(
        hosts.RelayTarget("default", "default"), note="test", at_most=hosts.IDLE_TIMEOUT * 100, idle_timeout=hosts.NO_IDLE_TIMEOUT
    )
    return ids


def handle(name: str) -> int:
    """Have a group handle what waits for it; say how many messages it had not handled before."""
    before = Inbox.objects.filter(consumer_group=name).count()
    with closing(Worker(group(name), "default")) as worker:
        worker.run(until_idle=True, seconds=30)
    return Inbox.objects.filter(consumer_group=name).count() - before
