"""The chart of messages published and handled in the last hour."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from outbox.admin.lines import Line, drawing
from outbox.monitoring.status import ROW_LIMIT, Minute


def chart(minutes: Sequence[Minute]) -> dict[str, Any]:
    """Return the context for the chart's template."""
    published = [minute.published for minute in minutes]
    handled = [minute.handled for minute in minutes]
    known = [count for count in published + handled if count is not None]
    text = (
        f"In the last hour {sum(filter(None, published)):,} messages were published and {sum(filter(None, handled)):,} handled, "
        f"at most {max(known, default=0):,} in a minute."
    )
    if len(known) < len(published + handled):
        text = f"{text} Only the newest {ROW_LIMIT:,} of each were counted; older ones are not shown."
    return drawing(
        "outbox-flow",
        "Messages published and handled, per minute",
        text,
        [Line("published", published), Line("handled, once for each group", handled)],
        begins_at=minutes[0].begins_at,
        ends_at=minutes[-1].begins_at + timedelta(minutes=1),
        say=lambda value: f"{value:,.0f}",
    )
