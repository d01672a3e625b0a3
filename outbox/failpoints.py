"""
Places where a test may stop, kill or break the process. Nothing happens unless `OUTBOX_FAILPOINTS` is set.

`OUTBOX_FAILPOINTS="relay.after_half=kill@3,consumer.before_ack=raise"`: at the third pass of `relay.after_half` the process
kills itself with SIGKILL; each pass of `consumer.before_ack` raises. Actions: `kill`, `stop` (SIGSTOP), `raise`, `hang`.
`@N` acts at the Nth pass only; without it, at each.

`relay.after_half=kill:/tmp/permit` kills only while there is a file of that name, and once for each file: the process that
dies renames it to `/tmp/permit.PID`. So a supervisor decides when, a process that was started again lives
on, and each kill leaves a trace. `stop:/tmp/permit` does the same.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

VARIABLE = "OUTBOX_FAILPOINTS"
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}

_passes: Counter[str] = Counter()


class FailpointReached(BaseException):
    """Raised by the action `raise`; no `except Exception` swallows it."""


def failpoint(name: str) -> None:
    """Act here as `OUTBOX_FAILPOINTS` says for that name; return at once when it says nothing."""
    plan = os.environ.get(VARIABLE)
    if not plan:
        return
    for entry in plan.split(","):
        place, _, rest = entry.strip().partition("=")
        if place == name:
            _passes[name] += 1
            action, _, nth = rest.partition("@")
            if not nth or _passes[name] == int(nth):
                _act(name, action)


def _act(name: str, action: str) -> None:
    action, _, permit = action.partition(":")
    if action in SIGNALS:
        if not permit or _take(Path(permit)):
            os.kill(os.getpid(), SIGNALS[action])
    elif action == "raise":
        raise FailpointReached(name)
    elif action == "hang":
        time.sleep(3600)
    else:
        raise ValueError(f"{VARIABLE} gives {name} the action {action!r}. Choices are: kill, stop, raise and hang.")


def _take(permit: Path) -> bool:
    """Take the permission to kill this process. Of several that ask, a rename lets one have it."""
    try:
        permit.rename(f"{permit}.{os.getpid()}")
    except FileNotFoundError:
        return False
    return True
