"""Archive finished days."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any

import psycopg

from outbox import database
from outbox.errors import OutboxError
from outbox.management.exits import unable
from outbox.management.private_file import write_privately
from outbox.pipeline.archive import archive, archive_config
from outbox.pipeline.management import JobCommand
from outbox.pipeline.spark.archiver import ArchiveConfig
from outbox.relay.hosts import databases


class Command(JobCommand):
    help = (
        "Move finished days that are due to the lake in OUTBOX['PIPELINE']['ARCHIVE'], with Spark in a child process. The "
        "command can be stopped and started again at any time. Exit code: 0 done, 1 some days that are due were kept, 2 failed."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--database", action="append", metavar="ALIAS", help="may be repeated (default: all)")

    def handle(self, **options: Any) -> None:
        try:
            aliases = databases(options["database"])
            if options["write_config"] and len(aliases) > 1:
                raise unable(f"A file is for one database. Name it with --database. Choices are: {', '.join(aliases)}.")
            configs = {alias: _config(alias, options) for alias in aliases}
            if options["write_config"]:
                write_privately(options["write_config"], configs.popitem()[1].to_json())
                return
            reports = {alias: archive(config, log=self.log) for alias, config in configs.items()}
        except (OutboxError, psycopg.Error, OSError) as error:
            raise unable(error) from error
        if options["json"]:
            self.stdout.write(json.dumps(reports))
        else:
            for alias, report in reports.items():
                self.stdout.write(_as_text(alias, report))
        if any(report["kept"] for report in reports.values()):
            raise SystemExit(1)


def _config(alias: str, options: dict[str, Any]) -> ArchiveConfig:
    with database.connect(alias) as connection:
        database.ensure_fit(alias, connection)
    more = {name: options[name] for name in ("reader", "master", "driver_memory")}
    return archive_config(alias, **more)


def _as_text(alias: str, report: dict[str, Any]) -> str:
    lines = [f"Database {alias!r}"]
    lines += [f"  {day}: archived, messages: {messages}" for day, messages in report["days"].items()]
    lines += [f"  {day}: kept: {reason}" for day, reason in report["kept"].items()]
    lines += [f"  {folder}: removed, the incomplete archive of an archiver that was stopped" for folder in report["abandoned"]]
    return "\n".join(lines if len(lines) > 1 else [*lines, "  nothing is due"])
