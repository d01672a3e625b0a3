"""The identity of the outbox in a database: its stable id, and the project that migrated it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import psycopg

from outbox import conf
from outbox.errors import NotMigrated, OtherProject

if TYPE_CHECKING:
    from outbox.database.connections import Connection

READ = "SELECT id, project FROM outbox_source"

# Insert the row with a new id if it is missing. The first project that migrates is recorded; afterwards only an operator changes
# the project.
ADOPT = """
INSERT INTO outbox_source (id, project) VALUES ('urn:uuid:' || gen_random_uuid(), %s)
ON CONFLICT (is_only) DO UPDATE SET project = excluded.project WHERE outbox_source.project = ''
"""


class Identity(NamedTuple):
    """
    The identity of a database's outbox.

    Args:
        source: the stable id: `ce-source` of the messages, part of their tokens, and the owner of the consumer groups.
        project: the project that the outbox belongs to; "" if that is not known.
    """

    source: str
    project: str


# An id of the server and of the database in it; and the timeline, which grows when a replica is promoted or a backup is restored.
READ_SERVER = """
SELECT system_identifier || '/' || (SELECT oid FROM pg_database WHERE datname = current_database()), timeline_id
FROM pg_control_system(), pg_control_checkpoint()
"""


def read_server(connection: Connection) -> tuple[str, int]:
    """
    Return values that tell a connection's database from a copy of it; ("", 0) if the server does not offer them.

    Returns:
        The server's system identifier with the database's id on this server, and the server's timeline.
    """
    try:
        with connection.transaction():
            return connection.execute(READ_SERVER).fetchone() or ("", 0)
    except (psycopg.ProgrammingError, psycopg.NotSupportedError):  # some hosted services lack or forbid these functions
        return "", 0


def read_identity(connection: Connection) -> Identity:
    """Return the identity of the outbox that a connection sees; two empty strings if its row is missing."""
    return Identity(*(connection.execute(READ).fetchone() or ("", "")))


def require_identity(connection: Connection) -> Identity:
    """
    Return the identity of the outbox that a connection sees.

    Raises:
        NotMigrated: the row with the identity is missing.
    """
    if not (identity := read_identity(connection)).source:
        raise no_identity(connection)
    return identity


def no_identity(connection: Connection) -> NotMigrated:
    """Return the error for a missing row of the identity."""
    return NotMigrated(
        f"The table outbox_source in database {connection.info.dbname!r} is empty, so its outbox has no id.",
        hint="Run manage.py migrate, with --database unless it is the default one: it writes a new id.",
    )


def adopt(connection: Connection) -> None:
    """Record that the tables belong to this project, unless a project is recorded; insert the row with an id if it is missing."""
    connection.execute(ADOPT, [conf.project()])


def problem_of_project(alias: str, identity: Identity) -> tuple[str, str] | None:
    """Return a text that names the other project which the tables belong to, and a remedy; None if they are this project's."""
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
        NotMigrated: the tables have no id.
        OtherProject: the tables belong to another project.
    """
    if problem := problem_of_project(alias, require_identity(connection)):
        raise OtherProject(*problem)
