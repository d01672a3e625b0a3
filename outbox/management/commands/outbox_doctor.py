"""Check everything that the delivery of messages needs."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from outbox.findings import Finding
from outbox.monitoring.doctor import check

SIGNS = {"ok": "ok", "warning": "!", "error": "!!"}  # the exit code is the index of the worst level


class Command(BaseCommand):
    help = (
        "Check the configuration, databases and their clocks, brokers, processes, whether stored messages can be read, and the "
        "check-back endpoint, and print what to do about problems. No message is sent. "
        "Exit code: 0 no problems, 1 something needs attention, 2 something cannot be reached, or cannot work."
    )
    requires_system_checks: list[str] = []  # the doctor runs the system checks itself, and reports their errors as findings

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print one line of JSON")

    def handle(self, **options: Any) -> None:
        findings = []
        for finding in check():
            findings.append(finding)
            if not options["json"]:
                self.stdout.write(_as_text(finding))
                self.stdout.flush()
        if options["json"]:
            self.stdout.write(json.dumps({"findings": [finding.as_dict() for finding in findings]}))
        if worst := max((list(SIGNS).index(finding.level_name) for finding in findings), default=0):
            raise SystemExit(worst)


def _as_text(finding: Finding) -> str:
    number = f"({finding.id}) " if finding.id else ""
    lines = [f"{SIGNS[finding.level_name]:<2}  {finding.subject}{finding.since_text}: {number}{finding.text}"]
    if finding.hint:
        lines.append(f"    {finding.hint}")
    return "\n".join(lines)
