"""What tests of several servers do with a topic: handle its messages, and compare them with what another program had sent."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from outbox import consumer
from outbox.consuming import register
from outbox.consuming.worker import Worker
from tests.outbox.brokers.messages_page import type_of
from tests.waiting import wait_until

HandleUntil = Callable[[Callable[[Any], object]], Any]


@pytest.fixture
def own_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox.message.registered", {})


@pytest.fixture
def seen(topic: str, no_consumers: None) -> list[Any]:
    """What a handler of the topic, in group "cart", is called with: message and context."""
    found: list[Any] = []
    consumer(topic=topic, group="cart")(lambda message, context: found.append((message, context)))
    return found


@pytest.fixture
def seen_typed(topic: str, no_consumers: None, own_types: None) -> list[Any]:
    """What a handler of the topic's type, in group "cart", is called with: message and context."""
    found: list[Any] = []
    consumer(type_of(topic), group="cart")(lambda message, context: found.append((message, context)))
    return found


@pytest.fixture
def handle_until(topic: str) -> Iterator[HandleUntil]:
    """Handle messages until a condition of the counts is true; return them."""
    with ExitStack() as workers:

        def handle_until(condition: Callable[[Any], object]) -> Any:
            worker = workers.enter_context(closing(Worker(register.group("cart"), "default")))
            wait_until(lambda: condition(worker.run(once=True)), 60)
            return worker.counts

        yield handle_until
