"""System checks of `OUTBOX["PIPELINE"]["ARCHIVE"]`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.checks import CheckMessage, Error, register

from outbox.checks.settings import known_settings
from outbox.pipeline.checks.settings import pipeline_settings


@register("outbox")
def check_archive(**kwargs: Any) -> list[CheckMessage]:
    """
    E036: `OUTBOX["PIPELINE"]["ARCHIVE"]["PATH"]` is not an absolute path on this machine.

    The path must not depend on the working directory of a process. Mount remote storage.

    E037: `OUTBOX["PIPELINE"]["ARCHIVE"]["AFTER"]` is shorter than `OUTBOX["RETENTION"]`.

    An archived day is deleted from the database. Raise AFTER, or lower RETENTION.
    """
    archive, retention = pipeline_settings().archive, known_settings().retention
    if archive is None:
        return []
    found: list[CheckMessage] = []
    path = archive.path
    if not Path(path).is_absolute() or "://" in path:
        text = f'OUTBOX["PIPELINE"]["ARCHIVE"]["PATH"] is {path!r}, which is not an absolute path.'
        found.append(Error(text, hint="Set it to a folder such as /srv/lake; mount remote storage.", id="outbox.E036"))
    if archive.after is not None and archive.after < retention:
        text = f'OUTBOX["PIPELINE"]["ARCHIVE"]["AFTER"] is {archive.after}, shorter than OUTBOX["RETENTION"], {retention}.'
        found.append(Error(text, hint="Remove AFTER, or set it to RETENTION or more.", id="outbox.E037"))
    return found
