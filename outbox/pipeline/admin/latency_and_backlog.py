"""Latency and backlog of an audit, prepared for its page: tables, and charts of the worst."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.contrib.admin import AdminSite

from outbox.admin.lines import Line, drawing
from outbox.admin.links import message_link
from outbox.pipeline.audit_runs.latency import LatencySeries, Percentiles
from outbox.pipeline.spark.bins import SHARES

DRAWN = 6  # charts of each
POINTS = 96  # of a chart
SHARES_DRAWN = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class DrawnBacklog:
    """The backlog of a group and topic. `minutes`: seconds since 1970 and backlog, first to last."""

    group: str
    topic: str
    backlog: int
    growth: float
    cause: str
    onset: datetime | None
    most_repeated: Sequence[Sequence[Any]]
    minutes: Sequence[Sequence[float]]


def latency_and_backlog(
    site: AdminSite,
    *,
    backlogs: Sequence[DrawnBacklog],
    latencies: Sequence[Percentiles],
    latency_series: Sequence[LatencySeries],
) -> dict[str, Any]:
    """Return the context of the template `_latency_and_backlog.html`."""
    worst = sorted(backlogs, key=lambda one: (-one.backlog, one.group, one.topic))
    return {
        "backlogs": [
            {"group": one.group, "topic": one.topic, "backlog": one.backlog, "growth": one.growth, "cause": one.cause}
            | {
                "onset": one.onset,
                "again": [(message_link(site, message), failures) for message, failures in one.most_repeated[:3]],
            }
            for one in worst
        ],
        "backlog_drawings": [_backlog(nth, one) for nth, one in enumerate(worst[:DRAWN]) if one.minutes],
        "shares": [f"p{share * 100:g}" for share in SHARES],
        "latencies": [
            {"topic": one.hop[0], "hop": one.hop[1], "group": one.hop[2], "count": one.count}
            | {"texts": ["" if seconds is None else format_seconds(seconds) for seconds in one.seconds.values()]}
            for one in latencies
        ],
        "latency_drawings": [_latency(nth, one) for nth, one in enumerate(latency_series)],
        "hidden_hops": max(0, len(latencies) - len(latency_series)),
    }


def format_seconds(seconds: float) -> str:
    """Return a latency as text: 40 µs, 3.2 ms, 1.5 s, 12 min, 3 h."""
    for limit, size, unit in ((0.001, 1e-6, "µs"), (1, 0.001, "ms"), (120, 1, "s"), (7200, 60, "min")):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 3600:.3g} h"


def _backlog(nth: int, one: DrawnBacklog) -> dict[str, Any]:
    step = -(-len(one.minutes) // POINTS)
    points = list(one.minutes[::-1][::step][::-1])  # the last one always
    text = f"Backlog: {one.backlog:,}."
    if one.onset:
        text = f"Backlog: {one.backlog:,}, growing by {one.growth:,.1f} per minute: {one.cause}."
    return drawing(
        f"outbox-backlog-{nth}",
        f"Backlog of {one.group}, {one.topic}",
        text,
        [Line("waiting messages", [value for _, value in points])],
        begins_at=datetime.fromtimestamp(points[0][0], UTC),
        ends_at=datetime.fromtimestamp(points[-1][0], UTC),
        say=lambda value: f"{value:,.0f}",
    )


def _latency(nth: int, one: LatencySeries) -> dict[str, Any]:
    topic, hop, group = one.hop
    of_group = f", group {group}" if group else ""
    return drawing(
        f"outbox-latency-{nth}",
        f"Latency of {topic}: {hop}{of_group}",
        "Logarithmic scale; gaps where there was no message.",
        [Line(f"p{share * 100:g}", one.seconds[share]) for share in SHARES_DRAWN],
        begins_at=one.begins_at,
        ends_at=one.ends_at,
        say=format_seconds,
        by_decades=True,
    )
