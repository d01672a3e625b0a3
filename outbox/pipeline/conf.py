"""`OUTBOX["PIPELINE"]`: each name with its type, default and unit."""

from __future__ import annotations

from datetime import timedelta

from outbox import conf
from outbox.conf.reading import read_section
from outbox.sections import Section

SETTING = 'OUTBOX["PIPELINE"]'


class AuditSettings(Section, frozen=True):
    """One entry of AUDIT: the rows of a model for each of which a message must have been published with `about=`."""

    model: str  # "shop.Order"
    expects: str  # the name of the message type as it is sent: "OrderPlaced"
    where: str = ""  # an SQL condition that selects rows; the table's alias is b
    at: str = ""  # the field with the time when a row was written; required once messages have been pruned


class ArchiveSettings(Section, frozen=True):
    """The archive of finished days. With it, a day is deleted from the database only after it was committed to the lake."""

    path: str  # absolute path of the lake; each database has a folder in it, named by its alias
    after: timedelta | None = None  # a day is archived when all of it is older than this; None: RETENTION


class PipelineSettings(Section, frozen=True):
    """Settings of audit and archive."""

    audit: dict[str, AuditSettings] = {}  # name -> business rows that must have a message
    audit_retention: timedelta = timedelta(days=90)  # how long runs of the audit and their findings are kept
    archive: ArchiveSettings | None = None  # None: old days are dropped without a copy
    # The folder with the jars of Spark's source for Kafka, if Spark cannot download them; "": Spark downloads them.
    kafka_jars: str = ""


@conf.cached
def settings() -> PipelineSettings:
    """
    Return the pipeline's current settings.

    Raises:
        ConfigurationError: a name is unknown, or a value is wrong; the text says which.
    """
    return read_section(conf.settings().pipeline, PipelineSettings, SETTING)
