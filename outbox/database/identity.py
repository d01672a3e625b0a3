"""The identity of the outbox in a database: its stable id, and the project that migrated it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

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
