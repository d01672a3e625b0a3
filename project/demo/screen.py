"""The output of the demo: progress, a table, and the next steps."""

from __future__ import annotations

import time
from typing import TextIO

from project.demo.report import Report


class Screen:
    """Writes to a stream, each line of progress with the seconds since the start."""

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
    kills, asked = report.kills, report.check_backs
    rows = [
        ("orders placed", report.orders, f"{report.cancellations} cancellations"),
        ("refused", report.refused_lines, "dirty lines, each kept with its reason"),
        ("rolled back", report.rolled_back, "payment declined after the order was published"),
        ("messages published", report.published, "orders, cancellations, shipments"),
        ("half messages", report.half_messages, f"{report.half_messages - report.published} more than messages: sent again"),
        (
            "killed with SIGKILL",
            kills.total,
            f"{kills.resident} resident relay, {kills.celery} Celery's, {kills.consumers} consumers",
        ),
        ("check-backs", sum(asked.values()), ", ".join(f"{count} {answer.upper()}" for answer, count in asked.items())),
        ("duplicate copies", report.duplicate_copies, "made by the broker; consumers could see each"),
        ("redelivered", report.redelivered, "deliveries that were not the first"),
        ("duplicates dropped", report.duplicates_dropped, "by the inbox"),
        ("handled", report.handled, f"p50 {report.p50_ms:,.0f} ms, p99 {report.p99_ms:,.0f} ms after the commit"),
        ("", "", ""),
        ("lost", report.lost, "committed, and not handled by everyone it concerns"),
        ("ghosts", report.ghosts, "seen by a consumer, and never committed"),
        ("applied twice", report.applied_twice, "effects that a message had more than once"),
    ]
    wide = max(len(name) for name, _, _ in rows)
    return "\n".join(f"  {name:<{wide}}  {number:>6}  {note}".rstrip() for name, number, note in rows)
