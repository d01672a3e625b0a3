"""The archive, seen from Django: what the archiving job is told, the job as a process, and one message out of the lake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from outbox import conf
from outbox.audit import database_source
from outbox.errors import ArchiveFailed, ConfigurationError
from outbox.pipeline.archive.config import ArchiveConfig
from outbox.pipeline.config import PipelineConfig, Reader
from outbox.pipeline.lake.base import open_lake
from outbox.pipeline.lake.lookup import Found, find_message

JOB = "outbox.pipeline.jobs.archive"


def archive_config(
    using: str, *, reader: Reader = "jdbc", now: datetime | None = None, master: str = "local[2]", driver_memory: str = "2g"
) -> ArchiveConfig:
    """
    Say what of a database is due, and where it goes.

    Raises:
        ConfigurationError: `OUTBOX["ARCHIVE"]` is not set.
    """
    settings = conf.settings()
    if settings.archive is None:
        raise ConfigurationError('There is no archive. Set OUTBOX["ARCHIVE"] = {"PATH": "/where/the/lake/is"}.')
    after = settings.archive.after or settings.retention
    source = database_source(using, reader)
    return ArchiveConfig(
        PipelineConfig(source, master=master, driver_memory=driver_memory),
        lake=str(lake_of(using)),
        before=((now or datetime.now(UTC)) - after).astimezone(UTC).date(),
        format=settings.archive.format,
    )


def lake_of(using: str) -> Path:
    """Give the folder of a database's lake. Raises ConfigurationError where there is none."""
    archive = conf.settings().archive
    if archive is None:
        raise ConfigurationError('There is no archive: OUTBOX["ARCHIVE"] is not set.')
    return Path(archive.path, using)


def find_archived(using: str, message_id: UUID) -> Found | None:
    """
    Find a message in a database's lake; None: it is not there.

    Raises:
        ConfigurationError: there is no archive.
        LakeError: the lake cannot be read.
    """
    return find_message(open_lake(str(lake_of(using))), message_id)


def archive_due(using: str) -> dict[str, Any]:
    """Archive what is due in a database, as `outbox_archive` does. Raises ConfigurationError, ArchiveFailed."""
    return run_job(archive_config(using))


def run_job(config: ArchiveConfig) -> dict[str, Any]:
    """
    Archive what is due, in a process of its own; its progress goes to standard error.

    Raises:
        ArchiveFailed: nothing, or nothing more, could be done.
    """
    with tempfile.TemporaryDirectory(prefix="outbox-archive-") as folder:  # ours alone: the configuration holds passwords
        given, output = Path(folder, "config.json"), Path(folder, "report.json")
        given.write_text(config.to_json())
        command = [sys.executable, "-m", JOB, "--config", str(given), "--output", str(output)]
        code = subprocess.run(command, env={**os.environ, "TZ": "UTC"}).returncode
        if code not in (0, 1) or not output.exists():
            raise ArchiveFailed(f"The archive was not brought to its end (exit code {code}); what the job said is above.")
        found: dict[str, Any] = json.loads(output.read_text())
        return found
