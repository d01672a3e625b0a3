from collections.abc import Iterator

import pytest
from django.db import transaction

OUTBOX = {
    "BROKERS": {"default": {"BACKEND": "outbox.brokers.memory.MemoryBroker"}},
    "TOPICS": {
        "made": {"TYPE": "transaction"},
        "moved": {"TYPE": "fifo"},
        "due": {"TYPE": "delay"},
    },
    "CELERY_WAKEUP": False,
}


@pytest.fixture(autouse=True)
def _topics(settings):
    settings.OUTBOX = OUTBOX


@pytest.fixture
def own_types(monkeypatch):
    """Forget the message types of the test when it ends; others' system checks would find fault with them."""
    monkeypatch.setattr("outbox.message.registered", {})


@pytest.fixture
def in_transaction(db: None) -> Iterator[None]:
    """A transaction of the publisher's, undone in the end: that of the test itself does not count."""
    with transaction.atomic():
        yield
        transaction.set_rollback(True)
