"""System checks of `OUTBOX["PIPELINE"]["ARCHIVE"]`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from django.core.checks import CheckMessage, Error

from outbox.checks.decorators import check
from outbox.checks.settings import known_settings
from outbox.pipeline.checks.settings import pipeline_settings


@check()
def check_archive() -> Iterable[CheckMessage]:
    """
    E036: `OUTBOX["PIPELINE"]["ARCHIVE"]["PATH"]` is not an absolute path on this machine.

    The path must not depend on the working directory of a process. Mount remote storage.

    E037: `OUTBOX["PIPELINE"]["ARCHIVE"]["AFTER"]` is shorter than `OUTBOX["RETENTION"]`.

    An archived day is deleted from the database. Raise AFTER, or lower RETENTION.
    """
    archive, retention = pipeline_settings().archive, known_settings().retention
    if archive is None:
        return
    path = archive.path
    if not Path(path).is_absolute() or "://" in path:
        text = f'OUTBOX["PIPELINE"]["ARCHIVE"]["PATH"] is {path!r}, which is not an absolute path.'
        yield Error(text, hint="Set it to a folder such as /srv/lake; mount remote storage.", id="outbox.E036")
    if archive.after is not None and archive.after < retention:
        text = f'OUTBOX["PIPELINE"]["ARCHIVE"]["AFTER"] is {archive.after}, shorter than OUTBOX["RETENTION"], {retention}.'
        yield Error(text, hint="Remove AFTER, or set it to RETENTION or more.", id="outbox.E037")
