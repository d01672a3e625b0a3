"""Simulated crashes: a failpoint raises an error in the thread of the test, so that nothing after it runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from outbox.failpoints import VARIABLE, FailpointReached

TRANSACTIONS = (
    "relay.after_open",
    "relay.after_settle",
    "relay.before_fence",
    "relay.after_fence",
    "relay.after_adopt",
    "relay.before_transaction",
    "relay.after_transaction",
    "relay.after_mark",
)
"""Failpoints of relays whose broker has transactional sends."""

PLACES = (
    "relay.after_claim",
    "relay.before_half",
    "relay.after_half",
    "relay.after_decide",
    "relay.after_send",
    "relay.after_commit",
    *TRANSACTIONS,
    "consumer.before_handler",
    "consumer.after_handler",
    "consumer.after_commit",
    "half_first.after_prepare",
    "half_first.after_half",
    "half_first.after_work",
    "half_first.after_commit",
    "half_first.after_end",
)
"""Failpoints of relays, of consumers and of half-first transactions, in the order in which a message passes them."""


@contextmanager
def crash(place: str) -> Iterator[None]:
    """
    Crash the code in the block when it first reaches a failpoint.

    Raises:
        AssertionError: the failpoint was not reached, or does not exist.
    """
    name = full_name(place)
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = ",".join([entry for entry in (before, f"{name}=raise") if entry])
    try:
        yield
    except FailpointReached as reached:
        if str(reached) != name:
            raise
    else:
        raise AssertionError(f"{name} was not reached, so nothing crashed. {_advice(name)}")
    finally:
        if before is None:
            os.environ.pop(VARIABLE)
        else:
            os.environ[VARIABLE] = before


def full_name(place: str) -> str:
    """Return the full name of a failpoint: `relay.after_half` for `after_half`. Those of half first have no short names."""
    names = [name for name in PLACES if name in (place, f"relay.{place}", f"consumer.{place}")]
    if len(names) == 1:
        return names[0]
    problem = f"{place!r} is ambiguous: write {' or '.join(names)}." if names else f"There is no failpoint {place!r}."
    raise AssertionError(f"{problem} Choices are: {', '.join(PLACES)}.")


def _advice(name: str) -> str:
    if name.startswith("half_first."):
        return "The block must publish half first, by outbox.atomic(half_first=...) or @transactional(half_first=...)."
    if name in ("relay.before_half", "relay.after_half", "relay.after_decide", "relay.after_commit"):
        needed = "a message of a topic that is sent in two phases (others reach relay.after_send)"
    elif name == "relay.after_send":
        needed = "a message of a topic that is sent in one phase (others reach relay.after_half)"
    elif name in TRANSACTIONS:
        needed = "a message whose broker sends in transactions, such as the memory broker with TRANSACTIONS=True"
    elif name == "relay.after_claim":
        needed = "a message that waits to be sent"
    else:
        needed = "a message that a consumer handles"
    return f"The block must call run_until_idle(), and there must be {needed}."
