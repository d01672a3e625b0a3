"""
Findings: problems that need attention, as `check`, the doctor, `outbox_status`, the overview, health and metrics show them.

A finding is a `CheckMessage` of Django, so `SILENCED_SYSTEM_CHECKS` silences it by its id in all these views. Rules yield
findings about the running system and are registered here, also by extensions. Problems of settings, and of databases before the
system runs, are found by Django's system checks.
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
        finding_id: the app's label and the problem, such as `outbox.no_relay`; also a label of metrics. "" if all is well.
        obj: the subject, for example topic 'orders', group 'points', or broker 'default'.
        msg: a sentence that says what is wrong.
        hint: a sentence that says what to do.
        error: the error of a broker or handler, for users who may view messages; "" if there is none.
        level: one of Django's levels. None: an error for ids in the `errors` of a rule, and ids like `outbox.E004`; for others,
            a warning.
        seconds: for how long the problem has existed; None if that is not known.
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
        self.database = ""  # set by the caller if several databases have the same subject
        self.since = None if seconds is None else datetime.now(UTC).replace(microsecond=0) - timedelta(seconds=int(seconds))

    @property
    def subject(self) -> str:
        """The subject, with its database if several databases have the same subject."""
        return f"{self.obj} of database {self.database!r}" if self.database else str(self.obj)

    @property
    def text(self) -> str:
        """The message, followed by the error if there is one."""
        return f"{self.msg} {self.error.rstrip('.')}." if self.error else self.msg

    @property
    def since_text(self) -> str:
        """The time since when the problem has existed, as a text that follows the subject; "" if that is not known."""
        return f", since {self.since.isoformat()}" if self.since else ""

    @property
    def level_name(self) -> str:
        """The level in a word: "error", "warning", or "ok" if nothing needs attention."""
        return "error" if self.is_serious() else "warning" if self.is_serious(WARNING) else "ok"

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as a dict for JSON."""
        fields = {"id": self.id, "level": self.level_name, "subject": self.subject, "text": self.text, "hint": self.hint}
        return fields | {"since": self.since and self.since.isoformat()}

    @property
    def line(self) -> str:
        """The whole finding in one line."""
        return f"{self.subject[:1].upper()}{self.subject[1:]}{self.since_text}: ({self.id}) {self.text} {self.hint}"

    def __str__(self) -> str:
        return f"{self.subject}: ({self.id}) {self.text}" + (f"\n\tHINT: {self.hint}" if self.hint else "")


class Needs(enum.Enum):
    """The arguments of a rule, and the views that call it."""

    STATUS = enum.auto()  # (status): called by all views of the running system, for each probe and scrape
    DATABASE = enum.auto()  # (status, connection): called by the same views, so the rule must take only milliseconds
    SERVERS = enum.auto()  # (): called by the doctor; the rule opens its connections itself


class Rule(NamedTuple):
    """A function that yields findings. Its docstring has, for each id, the problem and the remedy."""

    ids: tuple[str, ...]
    needs: Needs
    find: Callable[..., Iterable[Finding]]

    def failed(self, error: Exception) -> Finding:
        """
        rule_fails: A rule raises an error, for example a rule of an app that [extends the outbox](../how-to/extend.md).
            Correct the cause that the error names; if tables are missing, run `migrate`. Findings of other rules are still shown.
        """
        step = "Correct the cause that the error names; if tables are missing, run manage.py migrate."
        return Finding(RULE_FAILS, f"rule {self.ids[0]}", "It fails when it is called.", step, error=line_of(error))


RULE_FAILS = "outbox.rule_fails"
RULES: list[Rule] = []  # rules about causes come before rules about their effects
ERRORS: set[str] = set()  # ids whose level is an error; the level of all others is a warning

Find = TypeVar("Find", bound=Callable[..., Iterable[Finding]])


def rule(*ids: str, errors: Collection[str] = (), needs: Needs) -> Callable[[Find], Find]:
    """
    Register the decorated function as a rule that yields findings with these ids.

    An id begins with the label of the rule's app.

    Args:
        ids: ids of warnings.
        errors: ids of errors.
    """

    def register(find: Find) -> Find:
        RULES.append(Rule((*ids, *errors), needs, find))
        ERRORS.update(errors)
        return find

    return register


def rules(*needs: Needs) -> list[Rule]:
    """Return the rules of the installed apps that have one of these needs; rules of extensions come last."""
    matching = [rule_ for rule_ in RULES if rule_.needs in needs and rule_.ids[0].partition(".")[0] in apps.app_configs]
    return sorted(matching, key=lambda rule_: not rule_.ids[0].startswith("outbox."))


BROKER_AWAY = "outbox.broker_away"
BROKER_WEAK = "outbox.broker_weak"  # the broker works, but gives weaker guarantees than its page promises
MISCONFIGURED = "outbox.misconfigured"


# Findings of brokers about their options and servers. The caller of a broker sets `obj`, because it knows the broker's alias.
wrong_option = partial(Finding, "outbox.E004", "")
risky_option = partial(Finding, "outbox.W048", "")
misconfigured = partial(Finding, MISCONFIGURED, "")
weak = partial(Finding, BROKER_WEAK, "")
unavailable = partial(Finding, BROKER_AWAY, "")


def unreachable_broker(alias: str, text: str, error: str) -> Finding:
    """Return the finding for a broker that does not answer, with its error."""
    step = f'Start it, correct what its error names, or correct OUTBOX["BROKERS"]["{alias}"]. No message is lost meanwhile.'
    return Finding(BROKER_AWAY, f"broker {alias!r}", text, step, error=error)
