"""
Failpoints: named calls in the code at which a test may kill, stop or break the process.

Nothing happens unless the environment variable `OUTBOX_FAILPOINTS` is set, for example to
`relay.after_half=kill@3,consumer.after_commit=raise`. Then the process kills itself with SIGKILL when it passes the failpoint
`relay.after_half` for the third time, and each pass of `consumer.after_commit` raises an exception. The actions are `kill`,
`stop` (SIGSTOP), `raise` and `hang`. `@N` acts at the Nth pass only; without it, the action is taken at each pass.

`relay.after_half=kill:/tmp/permit` kills only if the file `/tmp/permit` exists; the process first renames it to
`/tmp/permit.PID`. So the creation of the file decides when a process is killed, only one process is killed per file, and each
kill leaves a trace. `stop:/tmp/permit` stops the process in the same way.
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
    """Raised by the action `raise`. A BaseException, so that no `except Exception` catches it."""


def failpoint(name: str) -> None:
    """Take the action that `OUTBOX_FAILPOINTS` names for this failpoint, if it names one."""
    plan = os.environ.get(VARIABLE)
    if not plan:
        return
    for entry in plan.split(","):
        failpoint_name, _, action_and_pass = entry.strip().partition("=")
        if failpoint_name == name:
            _passes[name] += 1
            action, _, nth = action_and_pass.partition("@")
            if not nth or _passes[name] == int(nth):
                _take_action(name, action)


def _take_action(name: str, action: str) -> None:
    action, _, permit = action.partition(":")
    if action in SIGNALS:
        if not permit or _take_permit(Path(permit)):
            os.kill(os.getpid(), SIGNALS[action])
    elif action == "raise":
        raise FailpointReached(name)
    elif action == "hang":
        time.sleep(3600)
    else:
        raise ValueError(f"{VARIABLE} gives {name} the action {action!r}. Choices are: kill, stop, raise and hang.")


def _take_permit(permit: Path) -> bool:
    """Take the permit file; return whether this process has it. Renaming the file succeeds in only one process."""
    try:
        permit.rename(f"{permit}.{os.getpid()}")
    except FileNotFoundError:
        return False
    return True
