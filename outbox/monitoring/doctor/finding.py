"""Findings of the doctor."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    """The severity of a finding, in ascending order."""

    OK = "ok"
    WARNING = "warning"  # needs attention
    ERROR = "error"  # cannot be reached, or cannot work


@dataclass(frozen=True, slots=True)
class Finding:
    """
    A finding of the doctor.

    Args:
        subject: what was checked: configuration, database 'default', ...
        hint: what to do; "" if there is nothing to do.
    """

    level: Level
    subject: str
    text: str
    hint: str = ""
