"""Fixtures for system checks, with settings and message types of the test."""

from collections.abc import Callable
from typing import Any

import pytest

from outbox.brokers.capabilities import HalfMessages
from outbox.brokers.memory import MemoryBroker

MEMORY = "outbox.brokers.memory.MemoryBroker"
BROKERS = {"default": {"BACKEND": MEMORY}}


class OnePhaseBroker(MemoryBroker):
    lacks = (HalfMessages,)
    supports_order = supports_delay = False


ONE_PHASE = {"default": {"BACKEND": f"{__name__}.OnePhaseBroker"}}


@pytest.fixture(autouse=True)
def _own_definitions(own_definitions: None) -> None:
    """Each test has message types and consumers of its own."""


@pytest.fixture
def routed(settings: Any) -> Callable[[object], None]:
    """Use one router, with the methods given."""

    def routed(router: object) -> None:
        settings.DATABASE_ROUTERS = [router]

    return routed
