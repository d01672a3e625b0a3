"""
The exit codes of all commands.

0: done, and nothing needs attention. 1: something needs attention, or was not done; the output names it. `outbox_consume` also
ends with 1 if a handler does not return within its time limit. 2: nothing could be done, because arguments or settings are wrong,
or a database or broker cannot be reached. 3: stopped by a signal during a call that did not return; other processes continue the
work.
"""

from __future__ import annotations

import psycopg
from django.core.management.base import CommandError

from outbox.shutdown import UNFINISHED

ENDED_UNFINISHED = f"{UNFINISHED} stopped by a signal during a call that did not return"
"""Part of the help of long-running commands."""


def unable(reason: object) -> CommandError:
    """Return the error that ends a command with exit code 2. `reason`: a text or an exception."""
    text = str(reason).strip()
    if any(isinstance(cause, psycopg.errors.UndefinedTable) for cause in (reason, getattr(reason, "__cause__", None))):
        text = f"A table is missing: {text.splitlines()[0]}. Run manage.py migrate, with --database for each database."
    return CommandError(" ".join([*getattr(reason, "__notes__", ()), text]), returncode=2)
