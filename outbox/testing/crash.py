"""Crashes: a failpoint raises in the thread of the test, and nothing after it is done."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from outbox.failpoints import VARIABLE, FailpointReached

PLACES = (
    "relay.after_claim",
    "relay.before_half",
    "relay.after_half",
    "relay.after_decide",
    "relay.after_send",
    "relay.after_commit",
    "consumer.before_handler",
    "consumer.after_handler",
    "consumer.after_commit",
    "half_first.after_fence",
    "half_first.after_half",
    "half_first.after_work",
    "half_first.after_commit",
    "half_first.after_end",
)
"""Where a relay, a consumer and who goes half first can be killed, each in the order of a message's way."""


@contextmanager
def crash(place: str) -> Iterator[None]:
    """
    End what runs inside, by force, at the first pass of that place.

    Raises:
        AssertionError: it was not passed, or is no place.
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
        raise AssertionError(f"{name} was not passed, so nothing crashed. {_advice(name)}")
    finally:
        if before is None:
            os.environ.pop(VARIABLE)
        else:
            os.environ[VARIABLE] = before


def full_name(place: str) -> str:
    """Return `relay.after_half` for `after_half`. Places of half first have no short name."""
    found = [name for name in PLACES if name in (place, f"relay.{place}", f"consumer.{place}")]
    if len(found) == 1:
        return found[0]
    what = f"{place!r} is in two places: write {' or '.join(found)}." if found else f"There is no place {place!r} to crash."
    raise AssertionError(f"{what} Places are: {', '.join(PLACES)}.")


def _advice(name: str) -> str:
    if name.startswith("half_first."):
        return "In the block, a transaction must go half first: transaction(half_first=...) or @transactional(half_first=...)."
    if name in ("relay.before_half", "relay.after_half", "relay.after_decide", "relay.after_commit"):
        what = "a message must wait, of a topic that travels as half messages (the others pass relay.after_send)"
    elif name == "relay.after_send":
        what = "a message must wait, of a topic that travels without half messages (the others pass relay.after_half)"
    elif name == "relay.after_claim":
        what = "a message must wait"
    else:
        what = "a message must come that a consumer takes"
    return f"In the block, {what}, and run_until_idle() be called."
