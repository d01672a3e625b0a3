"""The chart of messages published and handled in the last hour."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from django.utils.translation import gettext as _

from outbox.admin.lines import Line, drawing
from outbox.admin.text import number
from outbox.monitoring.status import ROW_LIMIT, Minute


def chart(minutes: Sequence[Minute]) -> dict[str, Any]:
    """Return the context for the chart's template."""
    published = [minute.published for minute in minutes]
    handled = [minute.handled for minute in minutes]
    known = [count for count in published + handled if count is not None]
    text = _("In the last hour {} messages were published and {} handled, at most {} in a minute.").format(
        number(sum(filter(None, published))), number(sum(filter(None, handled))), number(max(known, default=0))
    )
    if len(known) < len(published + handled):
        text += " " + _("Only the newest {} of each were counted; older ones are not shown.").format(number(ROW_LIMIT))
    return drawing(
        "outbox-flow",
        _("Messages published and handled, per minute"),
        text,
        [Line(_("published"), published), Line(_("handled, once for each group"), handled)],
        begins_at=minutes[0].begins_at,
        ends_at=minutes[-1].begins_at + timedelta(minutes=1),
        say=number,
    )
