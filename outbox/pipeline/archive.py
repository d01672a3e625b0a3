"""The Django side of the archive: configure and run the job, and look up a message in the lake."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

from outbox import conf
from outbox.errors import ConfigurationError
from outbox.extensions import RetentionHold
from outbox.logs import get_logger
from outbox.pipeline.conf import settings
from outbox.pipeline.errors import ArchiveFailed, ArchiveRunning
from outbox.pipeline.job_config import database_source
from outbox.pipeline.spark import ArchiverBusy
from outbox.pipeline.spark.archiver import ArchiveConfig
from outbox.pipeline.spark.config import PipelineConfig, Reader
from outbox.pipeline.spark.jobs import Log, run_job
from outbox.pipeline.spark.lake import ArchivedMessage, Lake, find_message

logger = get_logger(__name__)

HOLD = RetentionHold(
    "not archived yet",  # the archiver drops a day once it is in the lake
    lambda: (archive.after or conf.settings().retention) if (archive := settings().archive) else None,
    grace=timedelta(days=2),
    tables=frozenset(
        {
            "outbox_inbox",
            "outbox_failed_delivery",
            "outbox_duplicate",
            "outbox_check_back",
            "outbox_failed_send",
            "outbox_operator_act",
            "outbox_recorded",
        }
    ),
)
"""With an archive, pruning drops no days: only the archiver does, because it compares them with the lake before."""


def archive_config(using: str, *, reader: Reader = "jdbc", master: str = "local[2]", driver_memory: str = "2g") -> ArchiveConfig:
    """
    Return the configuration of the archive job of a database: which days are due, and where the lake is.

    Raises:
        ConfigurationError: `OUTBOX["PIPELINE"]["ARCHIVE"]` is not set.
    """
    archive = settings().archive
    if archive is None:
        raise ConfigurationError(
            "There is no archive.", hint='Set OUTBOX["PIPELINE"]["ARCHIVE"] = {"PATH": "/path/of/the/lake"}.'
        )
    return ArchiveConfig(
        PipelineConfig(database_source(using, reader), master=master, driver_memory=driver_memory),
        lake=str(Path(archive.path, using)),
        before=(datetime.now(UTC) - (archive.after or conf.settings().retention)).date(),
    )


def find_archived(using: str, message_id: UUID) -> ArchivedMessage | None:
    """
    Return a message from the lake of a database. None: the lake does not have it.

    Raises:
        ConfigurationError: there is no archive.
        LakeError: the lake cannot be read.
    """
    archive = settings().archive
    if archive is None:
        raise ConfigurationError('There is no archive: OUTBOX["PIPELINE"]["ARCHIVE"] is not set.')
    return find_message(Lake(Path(archive.path, using)), message_id)


def archive_due(using: str) -> None:
    """
    Archive the days of a database that are due, as `outbox_archive` does. If another archive of it is running, only log that.

    Raises:
        ConfigurationError: there is no archive.
        ArchiveFailed: the job failed.
    """
    try:
        report = archive(archive_config(using), log=logger.info)
    except ArchiveRunning as error:
        logger.warning("The archive of database %r was skipped. %s", using, error)
        return
    for day, reason in report["kept"].items():
        logger.warning("Day %s of database %r is due and was not archived: %s", day, using, reason)


def archive(config: ArchiveConfig, *, log: Log) -> dict[str, Any]:
    """
    Archive the days that are due, in a child process. Return its report.

    Raises:
        ArchiveRunning: another archive of this database is running.
        ArchiveFailed: the job failed; days that were archived before that stay archived.
    """
    result = run_job("archive", config.to_json(), log=log)
    if result.report is None:
        kind = ArchiveRunning if result.exit_code == ArchiverBusy.exit_code else ArchiveFailed
        raise kind(f"The archive did not finish{result.failure()}")
    return result.report
