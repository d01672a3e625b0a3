"""The whole audit of one history."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from outbox.pipeline.audit.details import with_ids, with_repeats
from outbox.pipeline.audit.keys import audit_business, audit_places
from outbox.pipeline.audit.lanes import audit_lanes
from outbox.pipeline.audit.order import audit_order
from outbox.pipeline.audit.unnumbered import audit_unnumbered
from outbox.pipeline.config import PipelineConfig
from outbox.pipeline.findings import Finding, merge
from outbox.pipeline.history import History
from outbox.pipeline.times import first_id_at

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Say = Callable[[str], None]


@dataclass(frozen=True)
class Report:
    """
    What an audit found.

    Args:
        counts: topic -> what -> how many messages.
        foreign: rows of other databases' messages, which are not judged.
    """

    as_of: datetime
    findings: list[Finding] = field(default_factory=list)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    foreign: int = 0
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Give the same as JSON knows it."""
        return {
            "as_of": self.as_of.isoformat(),
            "findings": [one.as_dict() for one in self.findings],
            "counts": self.counts,
            "foreign": self.foreign,
            "seconds": round(self.seconds, 2),
        }


def audit(spark: SparkSession, config: PipelineConfig, history: History, say: Say = lambda text: None) -> Report:
    """
    Hold business rows, outbox, broker and inbox to each other.

    Raises:
        HistoryError: what is there does not suffice for an answer.
    """
    started = time.monotonic()
    say("numbers of all lanes")
    lanes = audit_lanes(spark, config, history)
    findings = with_ids(config, history, merge(with_repeats(config, history, lanes.findings)))
    if config.since:
        history = history.since(first_id_at(config.since))
    for what, step in STEPS.items():
        say(what)
        findings += step(config, history)
    return Report(history.as_of, sorted(findings), lanes.counts, lanes.foreign, time.monotonic() - started)


STEPS: dict[str, Callable[[PipelineConfig, History], list[Finding]]] = {
    "business rows": audit_business,
    "places of messages": audit_places,
    "messages without a number": audit_unnumbered,
    "order of keys": audit_order,
}
