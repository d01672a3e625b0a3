"""
Faults between a claim and its mark, on separate database connections.

After each fault every message becomes visible in the end; exactly once on a broker whose ends are idempotent.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial

import pytest

from outbox.failpoints import FailpointReached
from outbox.relay import rounds
from outbox.relay.lane import take_lane
from outbox.relay.rounds import Relay
from tests.factories import TicketFactory
from tests.outbox.relay.faults.recovery import is_free
from tests.waiting import wait_until


@pytest.fixture
def at(monkeypatch) -> Callable[[str, Callable[[], object]], None]:
    """Call a function when a failpoint is reached next."""
    plans = defaultdict(list)

    def reach(name: str) -> None:
        if plans[name]:
            plans[name].pop(0)()

    monkeypatch.setattr(rounds, "failpoint", reach)
    return lambda name, action: plans[name].append(action)


@pytest.fixture
def start(connect, make_relay) -> Callable[..., Relay]:
    """Start a relay on a connection and a lane of its own."""

    def start(**options) -> Relay:
        connection = connect()
        return make_relay(connection, lane=take_lane(connection, lanes=16), **options)

    return start


@pytest.fixture
def crash_at(at, start) -> Callable[[str], None]:
    """Run a relay that dies at a failpoint as after SIGKILL: its connection is closed, and its lane is free."""

    def crash_at(name: str) -> None:
        def die() -> None:
            raise FailpointReached(name)

        dying = start()
        at(name, die)
        with pytest.raises(FailpointReached):
            dying.drain()
        dying.connection.close()
        wait_until(partial(is_free, dying.lane))

    return crash_at


@pytest.fixture
def wait(make_topic) -> Callable[..., list[str]]:
    """Publish messages in a new topic, with tickets."""

    def wait(kind: str = "transaction", count: int = 2) -> list[str]:
        return [str(ticket.message_id) for ticket in TicketFactory.create_batch(count, topic=make_topic(kind))]

    return wait
