"""The test's database, for processes of their own."""

from typing import Any
from urllib.parse import quote


def url_of(database: dict[str, Any]) -> str:
    """Name a database; the host, perhaps a socket's folder, in the query, as project.settings reads it."""
    user, password, host, port = (quote(str(database[name]), safe="") for name in ("USER", "PASSWORD", "HOST", "PORT"))
    return f"postgresql://{user}:{password}@:{port}/{database['NAME']}?host={host}"
