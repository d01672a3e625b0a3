"""Badges of a message's state, and of its state in groups that know and have not handled it."""

from __future__ import annotations

from collections.abc import Sequence

from django.utils.html import format_html_join
from django.utils.safestring import SafeString

from outbox.admin.text import badge, plain
from outbox.consuming.acts import GroupEnd
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


def state_badges(state: str, ended: Sequence[GroupEnd]) -> SafeString:
    """Return badges for a message's state, and for groups that have not handled it, which are more important than "sent"."""
    tone = Severity.PLAIN if ended and state == MessageStatus.SENT else TONES.get(state, Severity.WAITING)
    return format_html_join(" ", "{}", [(badge(state, tone),), *((_end(end),) for end in ended)])


def _end(one: GroupEnd) -> SafeString:
    by = f" by {plain(one.by)}" if one.by else ""
    tone = Severity.WAITING if one.outcome == "deferred" else Severity.BAD
    return badge(f"{one.outcome}{by} for group {plain(one.group)}", tone)
