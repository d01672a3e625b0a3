"""The archive, seen from Django: what the archiving job is told, the job as a process, and one message out of the lake."""

from __future__ import annotations

import logging
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
from outbox.pipeline.process import Say, run_job

logger = logging.getLogger(__name__)

JOB = "outbox.pipeline.jobs.archive"
NO_MORE = "Nothing more could be done: "  # how the job begins the line that says why


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
        catalog=settings.archive.catalog,
        namespace=f"{settings.archive.namespace}_{using}",
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


def archive_due(using: str) -> None:
    """Archive what is due in a database, as `outbox_archive` does. Raises ConfigurationError, ArchiveFailed."""
    report = archive(archive_config(using), say=logger.info)
    for day, reason in report["kept"].items():
        logger.warning("Database %r keeps %s, which is to be archived: %s", using, day, reason)


def archive(config: ArchiveConfig, *, say: Say) -> dict[str, Any]:
    """
    Archive what is due, in a process of its own.

    Args:
        say: is given what the job says, line by line.

    Raises:
        ArchiveFailed: nothing, or nothing more, could be done.
    """
    ended = run_job(JOB, config.to_json(), say=say)
    if ended.report is None:
        raise ArchiveFailed(f"The archive was not brought to its end{ended.why(NO_MORE)}")
    return ended.report
