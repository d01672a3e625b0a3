"""The identity of the outbox in a database: its stable id, and the project that migrated it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import psycopg

from outbox import conf
from outbox.errors import NotMigrated, OtherProject

if TYPE_CHECKING:
    from outbox.database.connections import Connection

READ = "SELECT id, project FROM outbox_source"

# A row that is gone gets a new id. The first project that migrates is noted; afterwards only an operator changes it.
ADOPT = """
INSERT INTO outbox_source (id, project) VALUES ('urn:uuid:' || gen_random_uuid(), %s)
ON CONFLICT (is_only) DO UPDATE SET project = excluded.project WHERE outbox_source.project = ''
"""


class Identity(NamedTuple):
    """
    The identity of a database's outbox.

    Args:
        source: its stable id: `ce-source` of its messages, part of its tokens, and the owner of its consumer groups.
        project: the project that it belongs to; "" where that is not known.
    """

    source: str
    project: str


# The server and, in it, the database; and the timeline, which grows when a replica is promoted or a backup restored.
READ_SERVER = """
SELECT system_identifier || '/' || (SELECT oid FROM pg_database WHERE datname = current_database()), timeline_id
FROM pg_control_system(), pg_control_checkpoint()
"""


def read_server(connection: Connection) -> tuple[str, int]:
    """
    Return what tells a connection's database from a copy of it; ("", 0) where the server does not tell.

    Returns:
        The system identifier of its server with its id there, and the server's timeline.
    """
    try:
        with connection.transaction():
            return connection.execute(READ_SERVER).fetchone() or ("", 0)
    except (psycopg.ProgrammingError, psycopg.NotSupportedError):  # of a service that lacks or forbids these functions
        return "", 0


def read_identity(connection: Connection) -> Identity:
    """Return the identity of the outbox that a connection sees; of empty strings where its row is missing."""
    return Identity(*(connection.execute(READ).fetchone() or ("", "")))


def require_identity(connection: Connection) -> Identity:
    """
    Return the identity of the outbox that a connection sees.

    Raises:
        NotMigrated: its row is missing.
    """
    if not (identity := read_identity(connection)).source:
        raise no_identity(connection)
    return identity


def no_identity(connection: Connection) -> NotMigrated:
    """Return the error that the row with the identity is missing."""
    return NotMigrated(
        f"The table outbox_source in database {connection.info.dbname!r} is empty, so its outbox has no id.",
        hint="Run manage.py migrate, with --database unless it is the default one: it writes a new id.",
    )


def adopt(connection: Connection) -> None:
    """Note this project as the one that the tables belong to, unless one is noted; write the row where it is missing."""
    connection.execute(ADOPT, [conf.project()])


def problem_of_project(alias: str, identity: Identity) -> tuple[str, str] | None:
    """Return which other project a database's tables belong to, and what to do; None where they are this project's."""
    owner, ours = identity.project, conf.project()
    if not owner or not ours or owner == ours:
        return None
    return (
        f"The tables of the outbox in database {alias!r} belong to the project {owner!r}, and this is {ours!r}.",
        "Let this project use a database or a schema of its own. If both are one project, set "
        f'OUTBOX["PROJECT"] = "{owner}" here; to hand the tables over, run UPDATE outbox_source SET project = \'{ours}\'.',
    )


def require_own_tables(alias: str, connection: Connection) -> None:
    """
    Raise unless the tables of the outbox have an id, and belong to this project or to none.

    Raises:
        NotMigrated: they have no id.
        OtherProject: they belong to another project.
    """
    if problem := problem_of_project(alias, require_identity(connection)):
        raise OtherProject(*problem)
