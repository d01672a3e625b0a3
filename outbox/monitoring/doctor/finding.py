"""What the doctor finds."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    """How much a finding matters. In this order."""

    OK = "ok"
    WARNING = "warning"  # an operator should see to it
    ERROR = "error"  # it cannot be asked, or nothing works without it


@dataclass(frozen=True, slots=True)
class Finding:
    """
    One finding.

    Args:
        subject: what was looked at: configuration, database 'default', ...
        hint: what to do; empty where all is well.
    """

    level: Level
    subject: str
    text: str
    hint: str = ""
