"""The output of the demo: progress, a table, and the next steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TextIO

from project.demo.report import Report


class Screen:
    """Writes to a stream. Each line of progress begins with the seconds since the start."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        """Write a line of progress."""
        self.write(f"{time.monotonic() - self._started:6.1f} s  {text}")

    def write(self, text: str) -> None:
        self.stream.write(f"{text}\n")
        self.stream.flush()


def table(report: Report) -> str:
    """Return the report as an aligned table."""
    kills = report.kills
    rows = [
        ("orders placed", report.orders, f"{report.cancellations} cancellations"),
        ("refused", report.refused_lines, "dirty lines, each kept with its reason"),
        ("rolled back", report.rolled_back, "payment declined after the order was published"),
        ("messages published", report.published, "orders, cancellations, shipments"),
        ("half messages", report.half_messages, _half_messages_note(report)),
        (
            "killed with SIGKILL",
            kills.total,
            f"{kills.long_running} long-running relay, {kills.celery} Celery's, {kills.consumers} consumers",
        ),
        *_faults_of_phases(report),
        ("redelivered", report.redelivered, "deliveries that were not the first"),
        ("duplicates dropped", report.duplicates_dropped, "by the inbox"),
        ("handled", report.handled, f"p50 {report.p50_ms:,.0f} ms, p99 {report.p99_ms:,.0f} ms after the commit"),
        ("", "", ""),
        ("lost", report.lost, "committed, and not handled by everyone it concerns"),
        ("ghosts", report.ghosts, "seen by a consumer, and never committed"),
        ("applied twice", report.applied_twice, "effects that a message had more than once"),
    ]
    width = max(len(name) for name, _, _ in rows)
    return "\n".join(f"  {name:<{width}}  {number:>6}  {note}".rstrip() for name, number, note in rows)


def _half_messages_note(report: Report) -> str:
    if report.two_phase:
        return f"{report.half_messages - report.published} more than messages: sent again"
    return "none, and no check-backs: the broker takes messages in one phase"


def _faults_of_phases(report: Report) -> Iterator[tuple[str, int, str]]:
    """Yield the rows that depend on whether the broker takes messages in one or two phases."""
    if report.two_phase:
        asked = report.check_backs
        yield "check-backs", sum(asked.values()), ", ".join(f"{count} {answer.upper()}" for answer, count in asked.items())
        yield "duplicate copies", report.duplicate_copies, "made by the broker; consumers could see each"
        return
    if outage := report.outage:
        note = f"with {outage.held} messages in queues of dead consumers; back on its data after {outage.seconds:.1f} s"
        yield "broker killed", 1, note
    resent = "sent again, since the confirm was lost, or its relay was killed before it recorded it"
    reason = "a relay that takes over asks the broker what was committed" if report.publishes_once else resent
    yield "duplicate copies", report.duplicate_copies, reason
