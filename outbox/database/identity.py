"""The identity of the outbox in a database: its stable id, and the project that migrated it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import psycopg

from outbox import conf
from outbox.errors import OtherProject

if TYPE_CHECKING:
    from outbox.database.connections import Connection

READ = "SELECT id, project FROM outbox_source"

# The first project that migrates; afterwards only an operator changes it.
ADOPT = "UPDATE outbox_source SET project = %s WHERE project = ''"


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


class ServerIdentity(NamedTuple):
    """
    What tells a database from a copy of it.

    Args:
        name: the system identifier of its server, and its id there. "": unknown.
        timeline: the server's timeline. 0: unknown.
    """

    name: str = ""
    timeline: int = 0


def read_server(connection: Connection) -> ServerIdentity:
    """Return the identity of a connection's database server; of unknown values where the server does not tell."""
    try:
        with connection.transaction():
            return ServerIdentity(*(connection.execute(READ_SERVER).fetchone() or ()))
    except (psycopg.ProgrammingError, psycopg.NotSupportedError):  # of a service that lacks or forbids these functions
        return ServerIdentity()


def read_identity(connection: Connection) -> Identity:
    """Return the identity of the outbox that a connection sees; of empty strings where its row is missing."""
    return Identity(*(connection.execute(READ).fetchone() or ("", "")))


def adopt(connection: Connection) -> None:
    """Note this project as the one that the tables belong to, unless one is noted."""
    connection.execute(ADOPT, [conf.project()])


def problem_of_project(alias: str, connection: Connection) -> tuple[str, str] | None:
    """Return which other project a database's tables belong to, and what to do; None where they are this project's."""
    owner, ours = read_identity(connection).project, conf.project()
    if not owner or not ours or owner == ours:
        return None
    return (
        f"The tables of the outbox in database {alias!r} belong to the project {owner!r}, and this is {ours!r}.",
        "Let this project use a database or a schema of its own. If both are one project, set "
        f'OUTBOX["PROJECT"] = "{owner}" here; to hand the tables over, run UPDATE outbox_source SET project = \'{ours}\'.',
    )


def require_own_tables(alias: str, connection: Connection) -> None:
    """
    Raise if the tables of the outbox belong to another project.

    Raises:
        OtherProject: they do.
    """
    if problem := problem_of_project(alias, connection):
        raise OtherProject(*problem)
