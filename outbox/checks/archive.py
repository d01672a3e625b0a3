"""The archive: where it is, and from when on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.checks import CheckMessage, Error

from outbox.checks.settings import known_settings


def check_archive(**kwargs: Any) -> list[CheckMessage]:
    """
    E036: `OUTBOX["ARCHIVE"]["PATH"]` is not an absolute folder of this machine.

    Processes begin in different folders, and the lake must be the same for all. Other storage is mounted.

    E037: `OUTBOX["ARCHIVE"]["AFTER"]` is shorter than `OUTBOX["RETENTION"]`.

    An archived day leaves the database. Raise AFTER, or lower RETENTION.
    """
    settings = known_settings()
    if settings.archive is None:
        return []
    found: list[CheckMessage] = []
    path = settings.archive.path
    if not Path(path).is_absolute() or "://" in path:
        text = f'OUTBOX["ARCHIVE"]["PATH"] is {path!r}, which is not an absolute path.'
        found.append(Error(text, hint="Name a folder such as /srv/lake; mount what lies elsewhere.", id="outbox.E036"))
    if settings.archive.after is not None and settings.archive.after < settings.retention:
        text = f'OUTBOX["ARCHIVE"]["AFTER"] is {settings.archive.after}, shorter than OUTBOX["RETENTION"], {settings.retention}.'
        found.append(Error(text, hint="Leave AFTER out, or make it as long as RETENTION.", id="outbox.E037"))
    return found
