"""The base of the commands that start a job of Spark."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

from django.core.management.base import BaseCommand


class JobCommand(BaseCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print one line of JSON")
        parser.add_argument(
            "--reader",
            choices=["jdbc", "python"],
            default="jdbc",
            help="how to read PostgreSQL; python needs no JDBC driver (default: jdbc)",
        )
        parser.add_argument("--master", default="local[2]", help="Spark's master (default: local[2])")
        parser.add_argument("--driver-memory", default="2g", metavar="SIZE", help="memory of Spark's driver (default: 2g)")
        parser.add_argument(
            "--write-config",
            type=Path,
            metavar="FILE",
            help="write the job's configuration, with passwords, to a file that only you can read, and exit",
        )

    def log(self, line: str) -> None:
        """Write a line of the job's log to standard error."""
        self.stderr.write(line, style_func=str)  # without the style of errors, since it is progress
