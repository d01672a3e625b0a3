"""`OUTBOX["PIPELINE"]`: every name with its type, default and unit."""

from __future__ import annotations

from datetime import timedelta

from outbox import conf
from outbox.conf.reading import read_section
from outbox.conf.sections import Section

PLACE = 'OUTBOX["PIPELINE"]'


class AuditSettings(Section, frozen=True):
    """One entry of AUDIT: rows of a model, each of which owes the world a message published `about=` it."""

    model: str  # "shop.Order"
    expects: str  # the message type's name on the wire, "OrderPlaced"
    where: str = ""  # SQL: only these rows; the table is called b
    at: str = ""  # the field that says when a row was written; needed once messages have been pruned


class ArchiveSettings(Section, frozen=True):
    """Where finished days go. With it, a day leaves the database only when the lake has it."""

    path: str  # the lake's folder, absolute; each database has a folder in it, by its alias
    after: timedelta | None = None  # a day is archived when all of it is that old; None: as old as RETENTION


class PipelineSettings(Section, frozen=True):
    """What audit and archive are told."""

    audit: dict[str, AuditSettings] = {}  # business rows that owe a message, by a name for them
    audit_retention: timedelta = timedelta(days=90)  # runs of the audit and their findings stay that long
    archive: ArchiveSettings | None = None  # None: old days are dropped, and are gone


def settings() -> PipelineSettings:
    """
    Return the pipeline's settings as they are now.

    Raises:
        ConfigurationError: a name is unknown, or a value is wrong; the text names the place.
    """
    global _known
    whole = conf.settings()
    if _known is None or _known[0] is not whole:  # read again when settings have changed
        _known = whole, read_section(whole.pipeline, PipelineSettings, PLACE)
    return _known[1]


_known: tuple[conf.Settings, PipelineSettings] | None = None
