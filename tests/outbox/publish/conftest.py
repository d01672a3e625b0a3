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
