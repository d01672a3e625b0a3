"""The archive, seen from Django: what the archiving job is told, the job as a process, and one message out of the lake."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

from outbox import conf
from outbox.database.retention_holds import RetentionHold
from outbox.errors import ConfigurationError
from outbox.logs import get_logger
from outbox.pipeline.conf import settings
from outbox.pipeline.errors import ArchiveFailed, ArchiveRunning
from outbox.pipeline.job_config import database_source
from outbox.pipeline.spark.archive.config import ArchiveConfig
from outbox.pipeline.spark.config import PipelineConfig, Reader
from outbox.pipeline.spark.errors import BUSY
from outbox.pipeline.spark.lake.lookup import Found, find_message
from outbox.pipeline.spark.lake.manifest import Lake
from outbox.pipeline.spark.process import Say, run_job

logger = get_logger(__name__)

JOB = "outbox.pipeline.spark.jobs.archive"
NO_MORE = "Nothing more could be done: "  # how the job begins the line that says why


HOLD = RetentionHold(
    "not archived yet",  # the archiver drops it, as soon as the lake has it
    lambda: (archive.after or conf.settings().retention) if (archive := settings().archive) else None,
    grace=timedelta(days=2),
    tables=frozenset(
        {"outbox_inbox", "outbox_delivery", "outbox_duplicate", "outbox_check_back", "outbox_attempt", "outbox_recorded"}
    ),
)
"""With an archive, days leave with it alone: only the archiver sees the lake, and whether it has a day as it is now."""


def archive_config(
    using: str, *, reader: Reader = "jdbc", now: datetime | None = None, master: str = "local[2]", driver_memory: str = "2g"
) -> ArchiveConfig:
    """
    Return what of a database is due, and where it goes.

    Raises:
        ConfigurationError: `OUTBOX["PIPELINE"]["ARCHIVE"]` is not set.
    """
    archive = settings().archive
    if archive is None:
        raise ConfigurationError('There is no archive. Set OUTBOX["PIPELINE"]["ARCHIVE"] = {"PATH": "/where/the/lake/is"}.')
    after = archive.after or conf.settings().retention
    source = database_source(using, reader)
    return ArchiveConfig(
        PipelineConfig(source, master=master, driver_memory=driver_memory),
        lake=str(lake_of(using)),
        before=((now or datetime.now(UTC)) - after).astimezone(UTC).date(),
    )


def lake_of(using: str) -> Path:
    """Return the folder of a database's lake. Raises ConfigurationError where there is none."""
    archive = settings().archive
    if archive is None:
        raise ConfigurationError('There is no archive: OUTBOX["PIPELINE"]["ARCHIVE"] is not set.')
    return Path(archive.path, using)


def find_archived(using: str, message_id: UUID) -> Found | None:
    """
    Find a message in a database's lake; None: it is not there.

    Raises:
        ConfigurationError: there is no archive.
        LakeError: the lake cannot be read.
    """
    return find_message(Lake(lake_of(using)), message_id)


def archive_due(using: str) -> None:
    """
    Archive what is due in a database, as `outbox_archive` does. Where another archive of it runs, this one is skipped.

    Raises:
        ConfigurationError: there is no archive.
        ArchiveFailed: nothing, or nothing more, could be done.
    """
    try:
        report = archive(archive_config(using), say=logger.info)
    except ArchiveRunning as error:
        logger.warning("The archive of database %r is skipped. %s", using, error)
        return
    for day, reason in report["kept"].items():
        logger.warning("Database %r keeps %s, which is to be archived: %s", using, day, reason)


def archive(config: ArchiveConfig, *, say: Say) -> dict[str, Any]:
    """
    Archive what is due, in a process of its own.

    Args:
        say: is given what the job says, line by line.

    Raises:
        ArchiveRunning: another one of this database runs.
        ArchiveFailed: nothing, or nothing more, could be done.
    """
    ended = run_job(JOB, config.to_json(), say=say)
    if ended.report is None:
        kind = ArchiveRunning if ended.exit_code == BUSY else ArchiveFailed
        raise kind(f"The archive was not brought to its end{ended.why(NO_MORE)}")
    return ended.report
