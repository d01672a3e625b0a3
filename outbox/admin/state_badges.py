"""Badges of a message's state, and of its state in the groups that know it and have not handled it."""

from __future__ import annotations

from collections.abc import Sequence

from django.utils.html import format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from outbox.admin.text import badge, plain
from outbox.consuming.acts import GroupState
from outbox.models import MessageState
from outbox.monitoring.timeline import Severity

MessageStatus = MessageState.MessageStatus

TONES: dict[str, str] = {
    MessageStatus.SENT: Severity.GOOD,
    MessageStatus.DEAD: Severity.BAD,
    MessageStatus.LOST: Severity.BAD,
    MessageStatus.RETRYING: Severity.BAD,
    MessageStatus.DISCARDED: Severity.PLAIN,
}


OUTCOMES = {"deferred": _("deferred"), "dead letter": _("dead letter"), "discarded": _("discarded")}


def state_badges(state: str, ended: Sequence[GroupState]) -> SafeString:
    """Return badges for a message's state and for groups that have not handled it; then "sent" is not shown in green."""
    tone = Severity.PLAIN if ended and state == MessageStatus.SENT else TONES.get(state, Severity.WAITING)
    return format_html_join(" ", "{}", [(badge(MessageStatus(state).label, tone),), *((_group_badge(*end),) for end in ended)])


def _group_badge(group: str, outcome: str, by: str) -> SafeString:
    tone = Severity.WAITING if outcome == "deferred" else Severity.BAD
    text = _("{outcome} by {by} for group {group}") if by else _("{outcome} for group {group}")
    return badge(text.format(outcome=OUTCOMES.get(outcome, outcome), by=plain(by), group=plain(group)), tone)
