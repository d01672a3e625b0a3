"""What the demo's tests have in common."""

import signal

import pytest


@pytest.fixture
def signal_handlers():
    """Restore the signal handlers that an Interrupt replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
