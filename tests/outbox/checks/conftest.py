"""What the system checks say, of settings and types that a test gives them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
from django.core.checks import CheckMessage, run_checks

from outbox.brokers.memory import MemoryBroker

MEMORY = "outbox.brokers.memory.MemoryBroker"
BROKERS = {"default": {"BACKEND": MEMORY}}


class OnePhaseBroker(MemoryBroker):
    supports_half_messages = supports_order = supports_delay = False


ONE_PHASE = {"default": {"BACKEND": f"{__name__}.OnePhaseBroker"}}


@pytest.fixture(autouse=True)
def _own_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's message types, consumers, check-back functions and what goes half first, not the shop's."""
    places = {
        "message": "_types",
        "consumer.register": "_groups",
        "check_back.register": "_resolvers",
        "publish.build": "_builds",
    }
    for module, name in places.items():
        monkeypatch.setattr(import_module(f"outbox.{module}"), name, {})


@pytest.fixture
def found() -> Callable[..., list[CheckMessage]]:
    """Run the system checks; give what those of this app say."""

    def found(**options: Any) -> list[CheckMessage]:
        return [problem for problem in run_checks(**options) if str(problem.id).startswith("outbox.")]

    return found


@pytest.fixture
def routed(settings: Any) -> Callable[[object], None]:
    """Have one router decide; it is asked what it has methods for."""

    def routed(router: object) -> None:
        settings.DATABASE_ROUTERS = [router]

    return routed
