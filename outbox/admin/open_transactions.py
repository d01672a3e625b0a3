"""The open transaction of a message that went half first (its half message was sent before its work), as a cell of a list."""

from __future__ import annotations

import re

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from outbox.admin.body_preview import HIDDEN
from outbox.admin.text import shown
from outbox.monitoring.open_transactions import DatabaseSession, Sessions
from outbox.monitoring.text import age

BLOCKING_SHOWN = 3

# Splits a statement into parts. Only the parts `name` and `other` are shown; all others are values, or may contain values.
# PostgreSQL truncates long statements, so any part may lack its end. Whether a backslash in a plain string escapes the next quote
# depends on a setting, so everything from such a string on is hidden. Comments may be nested, so one extends to the last `*/`.
_PARTS = re.compile(
    r"""
    (?P<name> "(?:[^"]|"")*(?:"|\Z) | (?![eE]')[^\W\d][\w$]* | \$\d+ )
    | (?P<other> [^\w"'$/.\-] | /(?!\*) | -(?!-) | \.(?!\d) )
    | [eE]'(?:[^'\\]|''|\\.)*+'
    | '(?:[^'\\]|'')*+'
    | \$(?P<tag>(?:[^\W\d]\w*)?)\$ .*? \$(?P=tag)\$
    | --[^\n]*
    | /\*.*\*/
    | \.?\d[\w.]*
    | .*
    """,
    re.VERBOSE | re.DOTALL,
)


def transaction_cell(sessions: Sessions, *, with_query: bool) -> SafeString:
    """
    Return a text about a message's transaction.

    Args:
        with_query: the user may see texts that may contain data of messages.
    """
    if isinstance(sessions, str):
        return shown(sessions, 500)
    if sessions:
        return _open(*sessions, with_query=with_query)
    return SafeString(
        _("No transaction is open: it has ended, or its connection was lost. The next check-back tells how it ended.")
    )


def masked(query: str) -> str:
    """Return a statement with each value and comment replaced by `HIDDEN`."""
    return _PARTS.sub(lambda part: part.group() if part["name"] or part["other"] else HIDDEN if part.group() else "", query)


def _open(session: DatabaseSession, *blocking: DatabaseSession, with_query: bool) -> SafeString:
    since = _("Open for {}").format(age(session.open_seconds)) if session.open_seconds is not None else _("Open")
    lines = [format_html("{}: {}", since, _described(session))]
    if with_query and not session.is_hidden:
        label = _("Current statement") if session.state == "active" else _("Last statement")
        lines.append(format_html("{}: <code>{}</code>", label, shown(masked(session.query), 300)))
    for blocker in blocking[:BLOCKING_SHOWN]:
        lines.append(format_html(_("It waits for {}"), _described(blocker)))
        if with_query and not blocker.is_hidden and blocker.query:
            lines.append(format_html("<code>{}</code>", shown(masked(blocker.query), 300)))
    if len(blocking) > BLOCKING_SHOWN:
        lines.append(format_html(_("It waits for {} more"), len(blocking) - BLOCKING_SHOWN))
    if any(other.is_hidden for other in (session, *blocking)):
        hidden = _("The rest is hidden from role {0}: GRANT pg_read_all_stats TO {0}.")
        lines.append(format_html(hidden, shown(session.reader)))
    return format_html_join(SafeString("<br>"), "{}", ((line,) for line in lines))


def _described(session: DatabaseSession) -> SafeString:
    """Describe a session: its process, role, client and state."""
    if not session.pid:
        return SafeString(_("a prepared transaction, which has no process"))
    parts = [
        _("process {}").format(session.pid) + (f" ({session.application})" if session.application else ""),
        _("role {}").format(session.role) if session.role else "",
        "" if session.is_hidden else _("from {}").format(session.client) if session.client else _("from the server's own host"),
        _("{} for {}").format(session.state, age(session.state_seconds)) if session.state else "",
    ]
    return shown(", ".join(part for part in parts if part))
