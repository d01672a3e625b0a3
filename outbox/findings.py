"""
What the outbox finds to be wrong, in one shape: for `check`, the doctor, `outbox_status`, the overview, health, metrics.

It is Django's `CheckMessage`, so `SILENCED_SYSTEM_CHECKS` silences each by its id in all of them.
"""

from __future__ import annotations

import re
from typing import Any

from django.core.checks import ERROR, WARNING, CheckMessage


class Finding(CheckMessage):
    """
    Something that needs attention.

    Args:
        finding_id: the app's label and the problem: `outbox.no_relay`. A label of metrics; "" without a problem.
        obj: the subject, for example topic 'orders', group 'points', or broker 'default'.
        msg: a sentence that says what is wrong.
        hint: a sentence that says what to do.
        error: the error of a broker or handler, for users who may view messages; "" if there is none.
        level: of Django's levels; None: an error where the id says so, as `outbox.E004` does, else a warning.
    """

    def __init__(self, finding_id: str, obj: str, msg: str, hint: str = "", *, error: str = "", level: int | None = None) -> None:
        default = ERROR if re.search(r"\.E\d+$", finding_id) else WARNING
        super().__init__(default if level is None else level, msg, hint, obj, finding_id)
        self.error = error

    @property
    def text(self) -> str:
        """The message, and the error that says more."""
        return f"{self.msg} {self.error.rstrip('.')}." if self.error else self.msg

    @property
    def level_name(self) -> str:
        """The level in a word: "error", "warning", or "ok" of what needs no attention."""
        return "error" if self.is_serious() else "warning" if self.is_serious(WARNING) else "ok"

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON has of it."""
        return {"id": self.id, "level": self.level_name, "subject": self.obj, "text": self.text, "hint": self.hint}

    def __str__(self) -> str:
        return f"{self.obj[:1].upper()}{self.obj[1:]}: ({self.id}) {self.text} {self.hint}"


BROKER_AWAY = "outbox.broker_away"
BROKER_WEAK = "outbox.broker_weak"  # it does its work, and keeps less than its page promises
MISCONFIGURED = "outbox.misconfigured"


# What brokers find in their options and at their servers. The caller knows under which alias, and sets `obj`.
def wrong_option(text: str, hint: str) -> Finding:
    return Finding("outbox.E004", "", text, hint)


def risky_option(text: str, hint: str) -> Finding:
    return Finding("outbox.W048", "", text, hint)


def misconfigured(text: str, hint: str) -> Finding:
    return Finding(MISCONFIGURED, "", text, hint)


def weak(text: str, hint: str) -> Finding:
    return Finding(BROKER_WEAK, "", text, hint)


def away(text: str, hint: str) -> Finding:
    return Finding(BROKER_AWAY, "", text, hint)


def broker_away(alias: str, text: str, error: str) -> Finding:
    """Return that a broker does not answer, with the error that says why."""
    step = f'Start it, correct what its error names, or correct OUTBOX["BROKERS"]["{alias}"]. No message is lost meanwhile.'
    return Finding(BROKER_AWAY, f"broker {alias!r}", text, step, error=error)
