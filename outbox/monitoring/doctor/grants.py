"""Check that the role of a database may do what web servers, relays and consumers do."""

from __future__ import annotations

from collections.abc import Iterator

from outbox.database import Connection
from outbox.monitoring.doctor.finding import Finding, Level

# Messages are written and read through their table, so the partitions of days need no grants; DEFAULT is read by itself. The
# sequences of identity columns need none either.
MISSING = r"""
SELECT privilege, array_agg(quote_ident(c.relname) ORDER BY c.relname)
FROM pg_class c, unnest(CASE c.relkind
    WHEN 'v' THEN ARRAY['SELECT'] WHEN 'S' THEN ARRAY['USAGE'] ELSE ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE'] END
) WITH ORDINALITY wanted (privilege, n)
WHERE c.relnamespace = current_schema()::regnamespace AND c.relname LIKE 'outbox\_%'
    AND (NOT c.relispartition OR c.relname = 'outbox_message_default')
    AND CASE WHEN c.relkind IN ('r', 'p', 'v') THEN NOT has_table_privilege(c.oid, privilege)
        WHEN c.relkind = 'S' THEN NOT has_sequence_privilege(c.oid, privilege)
            AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.objid = c.oid AND d.deptype = 'i')
        ELSE false END
GROUP BY privilege, n ORDER BY privilege = 'USAGE', n
"""

NAMED = 3  # relations named in the text; the statements name all

ROLE = "SELECT quote_ident(current_user)"


def check(subject: str, connection: Connection) -> Iterator[Finding]:
    """Yield the privileges that the role of a connection lacks, with the statements that grant them."""
    missing = connection.execute(MISSING).fetchall()
    if not missing:
        return
    [role] = connection.execute(ROLE).fetchone() or ("",)
    lacks = "; ".join(f"{privilege} on {_named(relations)}" for privilege, relations in missing)
    grants = " ".join(_grant(privilege, relations, role) for privilege, relations in missing)
    yield Finding(Level.ERROR, subject, f"role {role} lacks {lacks}", f"As the owner of the tables, run: {grants}")


def _grant(privilege: str, relations: list[str], role: str) -> str:
    kind = "SEQUENCE " if privilege == "USAGE" else ""
    return f"GRANT {privilege} ON {kind}{', '.join(relations)} TO {role};"


def _named(relations: list[str]) -> str:
    more = len(relations) - NAMED
    return ", ".join(relations) if more <= 0 else f"{', '.join(relations[:NAMED])} and {more} more"
