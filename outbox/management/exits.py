"""
What the exit codes of all commands mean.

0: done, and nothing needs a person. 1: something does, or was not done; the output says what. 2: nothing could be asked or
done, by wrong arguments or settings, or with a database or broker out of reach.
"""

from __future__ import annotations

from django.core.management.base import CommandError


def unable(reason: object) -> CommandError:
    """Make the error that ends a command with exit code 2."""
    return CommandError(str(reason).strip(), returncode=2)
