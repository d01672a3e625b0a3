"""
What the outbox finds to be wrong, in one shape: for `check`, the doctor, `outbox_status`, the overview, health, metrics.

It is Django's `CheckMessage`, so `SILENCED_SYSTEM_CHECKS` silences each by its id in all of them.
"""

from __future__ import annotations

from typing import Any

from django.core.checks import WARNING, CheckMessage


class Finding(CheckMessage):
    """
    Something that needs attention.

    Args:
        finding_id: the app's label and the problem: `outbox.no_relay`. A label of metrics; "" without a problem.
        obj: the subject, for example topic 'orders', group 'points', or broker 'default'.
        msg: a sentence that says what is wrong.
        hint: a sentence that says what to do.
        error: the error of a broker or handler, for users who may view messages; "" if there is none.
        level: of Django's levels.
    """

    def __init__(self, finding_id: str, obj: str, msg: str, hint: str = "", *, error: str = "", level: int = WARNING) -> None:
        super().__init__(level, msg, hint, obj, finding_id)
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
