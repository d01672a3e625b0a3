"""
What the outbox finds to be wrong, in one shape: for `check`, the doctor, `outbox_status`, the overview, health, metrics.

It is Django's `CheckMessage`, so `SILENCED_SYSTEM_CHECKS` silences each by its id in all of them. Rules about the running system
are registered here, those of extensions, too; those about settings, and about databases before it runs, are Django's checks.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

from django.apps import apps
from django.core.checks import ERROR, WARNING, CheckMessage

from outbox.logs import line_of


class Finding(CheckMessage):
    """
    Something that needs attention.

    Args:
        finding_id: the app's label and the problem: `outbox.no_relay`. A label of metrics; "" without a problem.
        obj: the subject, for example topic 'orders', group 'points', or broker 'default'.
        msg: a sentence that says what is wrong.
        hint: a sentence that says what to do.
        error: the error of a broker or handler, for users who may view messages; "" if there is none.
        level: of Django's levels; None: that of its rule, or an error where the id says so, as `outbox.E004` does.
        seconds: for how long it has been so; None if that is not known.
    """

    def __init__(
        self,
        finding_id: str,
        obj: str,
        msg: str,
        hint: str = "",
        *,
        error: str = "",
        level: int | None = None,
        seconds: float | None = None,
    ) -> None:
        is_error = finding_id in ERRORS or re.search(r"\.E\d+$", finding_id)
        default = ERROR if is_error else WARNING
        super().__init__(default if level is None else level, msg, hint, obj, finding_id)
        self.error = error
        self.database = ""  # where several have the same subjects
        self.since = None if seconds is None else datetime.now(UTC).replace(microsecond=0) - timedelta(seconds=int(seconds))

    @property
    def subject(self) -> str:
        """The subject, with its database where several have one of that name."""
        return f"{self.obj} of database {self.database!r}" if self.database else str(self.obj)

    @property
    def text(self) -> str:
        """The message, and the error that says more."""
        return f"{self.msg} {self.error.rstrip('.')}." if self.error else self.msg

    @property
    def since_text(self) -> str:
        """The time since when it has been so, to follow the subject; "" where that is not known."""
        return f", since {self.since.isoformat()}" if self.since else ""

    @property
    def level_name(self) -> str:
        """The level in a word: "error", "warning", or "ok" of what needs no attention."""
        return "error" if self.is_serious() else "warning" if self.is_serious(WARNING) else "ok"

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON has of it."""
        known = {"id": self.id, "level": self.level_name, "subject": self.subject, "text": self.text, "hint": self.hint}
        return known | {"since": self.since and self.since.isoformat()}

    @property
    def line(self) -> str:
        """All of it, in one line."""
        return f"{self.subject[:1].upper()}{self.subject[1:]}{self.since_text}: ({self.id}) {self.text} {self.hint}"

    def __str__(self) -> str:
        return f"{self.subject}: ({self.id}) {self.text}" + (f"\n\tHINT: {self.hint}" if self.hint else "")


class Needs(enum.Enum):
    """The arguments of a rule, and the views that call it."""

    STATUS = enum.auto()  # (status), in all views of the running system, for each probe and scrape
    DATABASE = enum.auto()  # (status, connection), in the same views, so it takes milliseconds
    SERVERS = enum.auto()  # (), in the doctor; it connects by itself


class Rule(NamedTuple):
    """A function that yields findings; its docstring says of each id what is found, and what to do."""

    ids: tuple[str, ...]
    needs: Needs
    find: Callable[..., Iterable[Finding]]

    def failed(self, error: Exception) -> Finding:
        """
        rule_fails: A rule raises an error when it is asked, such as one of an app that [extends the outbox](../how-to/extend.md).
            Correct what the error names; where its tables are missing, run `migrate`. The other rules are told.
        """
        step = "Correct what its error names; where tables are missing, run manage.py migrate."
        return Finding(RULE_FAILS, f"rule {self.ids[0]}", "It fails when it is asked.", step, error=line_of(error))


RULE_FAILS = "outbox.rule_fails"
RULES: list[Rule] = []  # causes come before their effects
ERRORS: set[str] = set()  # ids whose level is an error; that of others is a warning

Find = TypeVar("Find", bound=Callable[..., Iterable[Finding]])


def rule(*ids: str, errors: Collection[str] = (), needs: Needs) -> Callable[[Find], Find]:
    """
    Register a function as the rule of some ids, which begin with the label of its app.

    Args:
        ids: those of warnings.
        errors: those of errors.
    """

    def register(find: Find) -> Find:
        RULES.append(Rule((*ids, *errors), needs, find))
        ERRORS.update(errors)
        return find

    return register


def rules(*needs: Needs) -> list[Rule]:
    """Return the rules of the installed apps, those of extensions last."""
    known = [rule_ for rule_ in RULES if rule_.needs in needs and rule_.ids[0].partition(".")[0] in apps.app_configs]
    return sorted(known, key=lambda rule_: not rule_.ids[0].startswith("outbox."))


BROKER_AWAY = "outbox.broker_away"
BROKER_WEAK = "outbox.broker_weak"  # it does its work, and keeps less than its page promises
MISCONFIGURED = "outbox.misconfigured"


# What brokers find in their options and at their servers. The caller knows under which alias, and sets `obj`.
wrong_option = partial(Finding, "outbox.E004", "")
risky_option = partial(Finding, "outbox.W048", "")
misconfigured = partial(Finding, MISCONFIGURED, "")
weak = partial(Finding, BROKER_WEAK, "")
unavailable = partial(Finding, BROKER_AWAY, "")


def broker_away(alias: str, text: str, error: str) -> Finding:
    """Return that a broker does not answer, with the error that says why."""
    step = f'Start it, correct what its error names, or correct OUTBOX["BROKERS"]["{alias}"]. No message is lost meanwhile.'
    return Finding(BROKER_AWAY, f"broker {alias!r}", text, step, error=error)
