"""
Find the open transactions of messages that went half first: the half message was sent before the transaction began its work.

While such a transaction is open, check-backs about its message are answered UNKNOWN. The transaction takes an advisory lock with
its message row, and holds the lock until it ends, so it is found without a write and without waiting.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec
import psycopg

from outbox import database
from outbox.check_backs.sources import alias_of
from outbox.database.locks import Lock
from outbox.errors import OutboxError
from outbox.message import Token

STATEMENT_SECONDS = 15  # a person waits for the page

# The rows of a message: first the session that holds the message's lock; then, if that session waits, the sessions that block it.
# A role without pg_read_all_stats sees only a part of other roles' sessions.
READ = f"""
WITH lock AS MATERIALIZED (SELECT * FROM pg_locks),
holder AS MATERIALIZED (
    SELECT asked.id, held.pid, CASE WHEN EXISTS (SELECT FROM lock wanted WHERE wanted.pid = held.pid AND NOT wanted.granted)
        THEN pg_blocking_pids(held.pid) ELSE '{{}}' END AS blocking
    FROM unnest(%s::text[]) AS asked (id) JOIN lock held
    ON held.locktype = 'advisory' AND held.granted
    AND held.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND held.classid = {Lock.HALF_FIRST} AND held.objid = hashtext(asked.id)::oid
)
SELECT holder.id, one.pid, coalesce(a.usename, ''), coalesce(a.application_name, ''),
    coalesce(a.client_hostname || ' (' || host(a.client_addr) || ')', host(a.client_addr), ''),
    coalesce(a.state, ''), coalesce(a.query, ''),
    extract(epoch FROM clock_timestamp() - a.xact_start)::float8,
    extract(epoch FROM clock_timestamp() - a.state_change)::float8,
    coalesce(a.query = '<insufficient privilege>', false), current_user
FROM holder CROSS JOIN LATERAL unnest(holder.pid || holder.blocking) WITH ORDINALITY AS one (pid, nth)
LEFT JOIN pg_stat_activity a ON a.pid = one.pid
WHERE one.nth > 1 OR a.pid IS NOT NULL
ORDER BY holder.id, one.nth
"""


class DatabaseSession(msgspec.Struct, frozen=True):
    """
    A session of PostgreSQL, as `pg_stat_activity` has it.

    Args:
        pid: the id of the server's process; 0 for a prepared transaction, which has no session.
        client: the client's address, with its host name if the server looks names up; empty for a socket on the server.
        state: active, idle in transaction, …
        query: its statement, or the last one while it is idle, with the values in it.
        open_seconds: seconds since its transaction began; None if it has none, or the time is hidden.
        state_seconds: seconds since its state changed.
        is_hidden: whether its client, state, times and query are hidden from `reader`, the role of this connection.
    """

    pid: int
    role: str
    application: str
    client: str
    state: str
    query: str
    open_seconds: float | None
    state_seconds: float | None
    is_hidden: bool
    reader: str


Sessions = list[DatabaseSession] | str
"""The session of a transaction, then the sessions that block it; empty if the transaction has ended. A text if it is unknown."""


def read_open_transactions(halves: Iterable[tuple[str, str]]) -> dict[str, Sessions]:
    """
    Return the sessions of half messages' transactions, by message id, with one statement in each database of their tokens.

    Args:
        halves: message ids with tokens. Messages that did not go half first are left out.
    """
    asked: dict[str, set[str]] = {}
    for message_id, token in halves:
        if source := _source_of(token):
            asked.setdefault(source, set()).add(message_id)
    sessions: dict[str, Sessions] = {}
    for source, message_ids in asked.items():
        sessions |= _read(source, message_ids)
    return sessions


def _source_of(token: str) -> str:
    """Return the source that the token of a half-first message names; "" for any other token."""
    try:
        parsed = Token.parse(token)
    except ValueError:
        return ""
    return parsed.source if parsed.is_half_first else ""


def _read(source: str, message_ids: Collection[str]) -> dict[str, Sessions]:
    """Return the sessions of messages whose tokens name one source, or why they are unknown."""
    alias = alias_of(str(Token(source, 0, 1, 1)), otherwise="")
    if not alias:
        return dict.fromkeys(message_ids, f"No database of this project with the source {source} answers.")
    try:
        sessions = _read_sessions(alias, message_ids)
        return {message_id: sessions.get(message_id, []) for message_id in message_ids}
    except psycopg.errors.QueryCanceled:
        trouble = f"Database {alias!r} did not answer within {STATEMENT_SECONDS} s."
    except (OutboxError, psycopg.Error) as error:
        trouble = f"Database {alias!r} cannot be queried: {str(error).strip()}"
    return dict.fromkeys(message_ids, trouble)


def _read_sessions(alias: str, message_ids: Collection[str]) -> dict[str, list[DatabaseSession]]:
    """Return the sessions of each message: the session of its transaction, then the sessions that block that one."""
    limit = {"statement_timeout": f"{STATEMENT_SECONDS}s"}
    with database.connect(alias, application_name="outbox open transactions", settings=limit) as connection:
        rows = connection.execute(READ, [list(message_ids)]).fetchall()
    sessions: dict[str, list[DatabaseSession]] = {}
    for message_id, *values in rows:
        of_message = sessions.setdefault(message_id, [])
        session = DatabaseSession(*values)
        if session.pid not in [known.pid for known in of_message]:  # a parallel query has a row for each of its workers
            of_message.append(session)
    return sessions
