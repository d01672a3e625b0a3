"""The test's database, for processes of their own."""

import os
from typing import Any
from urllib.parse import quote

from django.db import connection


def url_of(database: dict[str, Any]) -> str:
    """Name a database; the host, perhaps a socket's folder, in the query, as project.settings reads it."""
    user, password, host, port = (quote(str(database[name]), safe="") for name in ("USER", "PASSWORD", "HOST", "PORT"))
    return f"postgresql://{user}:{password}@:{port}/{database['NAME']}?host={host}"


def environment_of(settings: str, **variables: str) -> dict[str, str]:
    """Return the environment of a process on the test's database, with those settings."""
    named = {"DATABASE_URL": url_of(connection.settings_dict), "DJANGO_SETTINGS_MODULE": settings}
    return {**os.environ, **named, **variables}
