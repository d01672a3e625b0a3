"""
What the exit codes of all commands mean.

0: done, and nothing needs attention. 1: something does, or was not done; the output says what. 2: nothing could be asked or
done, by wrong arguments or settings, or with a database or broker out of reach. 3: ended as told, and left a call that did not
return; what it held is taken up by others.
"""

from __future__ import annotations

import psycopg
from django.core.management.base import CommandError

from outbox.ending import UNFINISHED

ENDED_UNFINISHED = f"{UNFINISHED} ended as told in the middle of a call that did not return"
"""For the help of resident commands."""


def unable(reason: object) -> CommandError:
    """Make the error that ends a command with exit code 2. `reason`: a text, or what was raised."""
    text = str(reason).strip()
    if any(isinstance(one, psycopg.errors.UndefinedTable) for one in (reason, getattr(reason, "__cause__", None))):
        text = f"A database lacks a table: {text.splitlines()[0]}. Run manage.py migrate, for each database with --database."
    return CommandError(" ".join([*getattr(reason, "__notes__", ()), text]), returncode=2)
