import pytest

OUTBOX = {
    "BROKERS": {"default": {"BACKEND": "outbox.brokers.memory.MemoryBroker"}},
    "TOPICS": {
        "made": {"TYPE": "transaction"},
        "moved": {"TYPE": "fifo"},
        "due": {"TYPE": "delay"},
    },
    "NUDGE": False,
}


@pytest.fixture(autouse=True)
def _topics(settings):
    settings.OUTBOX = OUTBOX


@pytest.fixture
def own_types(monkeypatch):
    """Forget the message types of the test when it ends; others' system checks would find fault with them."""
    monkeypatch.setattr("outbox.message.registered", {})
