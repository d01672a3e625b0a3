"""The embedded broker, which asks at once, beside a memory broker with faults on demand; and real transactions."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from outbox import conf, database, topics
from outbox.brokers.base import EndSemantics
from outbox.brokers.capabilities import HalfMessages
from outbox.brokers.memory import MemoryBroker
from outbox.embedded import EmbeddedBroker
from outbox.half_first.producers import close_idle
from outbox.relay.rounds import Relay

SOON = timedelta(microseconds=1)

OUTBOX: dict[str, Any] = {
    "BROKERS": {
        "default": {
            "BACKEND": "outbox.embedded.EmbeddedBroker",
            "OPTIONS": {"CHECK_AFTER": SOON, "CHECK_INTERVAL": SOON, "CHECK_LIMIT": 1000},
        },
        "one-phase": {"BACKEND": "tests.outbox.half_first.conftest.OnePhaseBroker"},
    },
    "TOPICS": {
        "orders": {"TYPE": "transaction"},
        "notes": {"TYPE": "normal"},
        "letters": {"TYPE": "transaction", "BROKER": "one-phase"},
    },
    "RELAY": {"SWEEP_AGE": SOON},
    "CHECK_BACK": {"LOCK_TIMEOUT": timedelta(milliseconds=300)},
    "CELERY_WAKEUP": False,
}


class OnePhaseBroker(EmbeddedBroker):
    lacks = (HalfMessages,)


class SharedBroker(MemoryBroker):
    """A memory broker that says what it is: safe to call from several threads at once."""

    is_thread_safe = True


@pytest.fixture(autouse=True)
def _half_first(transactional_db: None, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    settings.OUTBOX = OUTBOX
    monkeypatch.setattr("outbox.relay.rounds.RETRY_BASE", SOON)
    topics.forget("default")
    yield
    close_idle()
    topics.forget("default")


@pytest.fixture
def broker(_half_first: None) -> Iterator[EmbeddedBroker]:
    """The embedded broker as another process has it."""
    broker = conf.make_broker("default")
    assert isinstance(broker, EmbeddedBroker)
    yield broker
    broker.close()


@pytest.fixture
def use_memory(settings: Any) -> Any:
    """Put a memory broker with a window for commits in the embedded one's place; its controls come back."""

    def use(end: EndSemantics = EndSemantics.IDEMPOTENT, kind: type[MemoryBroker] = MemoryBroker) -> MemoryBroker:
        options = {"NAME": uuid4().hex, "END": end, "COMMIT_WINDOW": timedelta(seconds=2)}
        brokers = {"default": {"BACKEND": f"{kind.__module__}.{kind.__qualname__}", "OPTIONS": options}}
        settings.OUTBOX = {**OUTBOX, "BROKERS": brokers, "TOPICS": {"orders": {"TYPE": "transaction"}}}
        broker = conf.make_broker("default")
        assert isinstance(broker, kind)
        return broker

    return use


@pytest.fixture
def memory(use_memory: Any) -> MemoryBroker:
    """A memory broker in the embedded one's place."""
    broker: MemoryBroker = use_memory()
    return broker


@pytest.fixture
def relay(broker: EmbeddedBroker) -> Iterator[Relay]:
    with database.connect("default") as connection:
        yield Relay(connection, broker, 1)


@pytest.fixture
def other_connection(_half_first: None) -> Iterator[database.Connection]:
    """A second client of the same database."""
    with database.connect("default") as connection:
        yield connection
