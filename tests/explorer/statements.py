"""
The seam at the database: each statement of an actor is a step, whichever connection it goes over.

psycopg runs every statement through `Connection.wait()`, which is replaced here. A statement that waits for a lock is found by
`pg_blocking_pids()`. PostgreSQL's own time-outs are switched off: they would measure how long this machine took.
"""

from __future__ import annotations

import re
import select
import sys
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg.pq import PGconn, TransactionStatus
from psycopg.waiting import Ready, Wait

from tests.explorer.scheduler import Actor, Fault, Killed, current

POLL_MS = 3
FAULTS = (Fault.LOST_REQUEST, Fault.LOST_REPLY, Fault.KILL)
ENDS = ("_commit_gen", "_rollback_gen")

# Statements that no guarantee depends on are not steps.
QUIET_FILES = {"own_connection.py", "heartbeats.py", "subscriptions.py", "identity.py", "topics.py", "connections.py"}
TIMEOUTS = {"lock_timeout", "idle_in_transaction_session_timeout", "statement_timeout"}
ROOT = Path(__file__).parents[2]
OUTBOX = str(ROOT / "outbox") + "/"
HERE = str(Path(__file__).parent) + "/"

real_wait, real_close = psycopg.Connection.wait, psycopg.Connection.close
opened: WeakKeyDictionary[Actor, list[Any]] = WeakKeyDictionary()


class Monitor:
    """The scheduler's own connection, which looks at the others."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection

    def is_blocked(self, pid: int) -> bool:
        """Return whether the statement of a backend waits for a lock."""
        return self._value("SELECT cardinality(pg_blocking_pids(%s)) > 0", pid)

    def cancel(self, pid: int) -> None:
        """Break off the statement of a backend."""
        self._value("SELECT pg_cancel_backend(%s)", pid)

    def wait_for_end(self, pids: list[int]) -> None:
        """Wait until backends are gone, with their locks."""
        while self._value("SELECT count(*) > 0 FROM pg_stat_activity WHERE pid = ANY(%s)", pids):
            time.sleep(0.0005)

    def _value(self, statement: str, parameter: object) -> bool:
        row = self.connection.execute(statement, [parameter]).fetchone()
        return bool(row and row[0])


MONITOR: list[Monitor] = []


def install(monitor: Monitor) -> None:
    """Make each statement of an actor a step."""
    from outbox.database.own_connection import OwnConnection

    MONITOR[:] = [monitor]
    psycopg.Connection.wait = _wait
    psycopg.Connection.close = _close
    psycopg.Connection._connect_gen = classmethod(_connect)
    set_up = OwnConnection.set_up

    def set_up_without_timeouts(self: Any, settings: Mapping[str, str], **options: Any) -> None:
        set_up(self, {name: value for name, value in settings.items() if name not in TIMEOUTS}, **options)

    OwnConnection.set_up = set_up_without_timeouts


class Pool:
    """
    The sessions of connections that actors have closed, reset, for those that they open: a new one costs 5 ms, and its first
    statements as much again.
    """

    def __init__(self) -> None:
        self._idle: dict[str, list[PGconn]] = {}
        self._closed = PGconn.connect_start(b"")
        self._closed.finish()

    def take(self, conninfo: str) -> PGconn | None:
        """Return an idle session of that kind; None if there is none."""
        idle = self._idle.get(conninfo)
        return idle.pop() if idle else None

    def put(self, connection: psycopg.Connection[Any], conninfo: str) -> None:
        """Close a connection, and keep its session without its locks and settings."""
        pgconn, connection.pgconn, connection._closed = connection.pgconn, self._closed, True
        pgconn.exec_(b"DISCARD ALL")
        self._idle.setdefault(conninfo, []).append(pgconn)


POOL = Pool()
real_connect = psycopg.Connection._connect_gen.__func__


def _connect(cls: type[psycopg.Connection[Any]], conninfo: str = "") -> Generator[Any, Any, psycopg.Connection[Any]]:
    pgconn = POOL.take(conninfo) if current() is not None else None
    connection = cls(pgconn) if pgconn is not None else (yield from real_connect(cls, conninfo))
    connection.explorer_conninfo = conninfo
    return connection


def _close(self: psycopg.Connection[Any]) -> None:
    """Close a connection; in an actor, return only when its locks are free."""
    actor = current()
    if self.closed or actor is None:
        real_close(self)
    elif self.pgconn.transaction_status == TransactionStatus.IDLE:
        if self in (known := opened.get(actor, [])):
            known.remove(self)
        POOL.put(self, self.explorer_conninfo)
    else:
        _break([self])
        real_close(self)


def close_all(actor: Actor) -> None:
    """Close the connections of an actor and wait until the server has noticed."""
    _break(opened.pop(actor, []))


def _break(connections: list[Any]) -> None:
    pids = [one.info.backend_pid for one in connections if not one.closed]
    for one in connections:
        one.pgconn.finish()
    if pids:
        MONITOR[0].wait_for_end(pids)


def _wait(self: psycopg.Connection[Any], gen: Any, *args: Any, **options: Any) -> Any:
    actor = current()
    if actor is None or self is MONITOR[0].connection:
        return real_wait(self, gen, *args, **options)
    if actor.is_killed:
        gen.close()
        raise Killed
    known = opened.setdefault(actor, [])
    if self not in known:
        known.append(self)
    if _does_nothing(self, gen):
        return real_wait(self, gen, *args, **options)
    cursor = gen.gi_frame.f_locals.get("self") if gen.gi_code.co_name == "_execute_gen" else None
    label = _label(gen)
    if label is None:
        return _drive(actor, self, gen)
    fault = actor.stop(label, FAULTS, is_decisive=_is_decisive(label))
    if fault is Fault.LOST_REQUEST:
        gen.close()
        _break([self])
        raise psycopg.OperationalError("The connection broke: the statement was lost.")
    step = actor.step
    try:
        result = _drive(actor, self, gen)
    except psycopg.Error as error:
        step.outcome = actor.step.outcome = type(error).__name__
        raise
    found = cursor.pgresult.command_status if cursor is not None and cursor.pgresult is not None else None
    step.outcome = actor.step.outcome = found.decode() if found else ""
    if fault is Fault.LOST_REPLY:
        _break([self])
        raise psycopg.OperationalError("The connection broke: the answer was lost.")
    return result


def _does_nothing(connection: psycopg.Connection[Any], gen: Any) -> bool:
    is_idle = connection.pgconn.transaction_status == TransactionStatus.IDLE
    return is_idle and getattr(gen, "gi_code", None) is not None and gen.gi_code.co_name in ENDS


def _drive(actor: Actor, connection: psycopg.Connection[Any], gen: Generator[Wait, Ready, Any]) -> Any:
    """Run a statement; while it waits for a lock, the actor is blocked."""
    was_blocked = False
    try:
        wanted = next(gen)
        poll = select.poll()
        fd, pid = connection.pgconn.socket, connection.pgconn.backend_pid
        poll.register(fd, _events(wanted))
        while True:
            happened = poll.poll(POLL_MS)
            if not happened:
                if MONITOR[0].is_blocked(pid):
                    if actor.must_give_up:
                        MONITOR[0].cancel(pid)
                    else:
                        was_blocked = True
                        actor.block()
                continue
            bits = happened[0][1]
            can_read = Ready.R if bits & (select.POLLIN | select.POLLHUP | select.POLLERR) else Ready.NONE
            can_write = Ready.W if bits & select.POLLOUT else Ready.NONE
            wanted = gen.send(Ready(can_read | can_write))
            poll.modify(fd, _events(wanted))
    except StopIteration as end:
        if was_blocked:
            actor.resume()
        return end.value
    except psycopg.errors.QueryCanceled as error:
        if not actor.must_give_up:
            raise
        actor.must_give_up = False
        actor.resume()
        raise psycopg.errors.LockNotAvailable("canceling statement due to lock timeout") from error
    except psycopg.Error:
        if was_blocked:
            actor.resume()
        raise


def _events(wanted: Wait) -> int:
    return (select.POLLIN if wanted & Wait.R else 0) | (select.POLLOUT if wanted & Wait.W else 0)


def _label(gen: Any) -> str | None:
    """Return what a statement is called in a trace; None where it is not a step."""
    where = _caller()
    if where is None or where.partition(":")[0] in QUIET_FILES:
        return None
    code = gen.gi_code.co_name
    if code == "_execute_gen":
        return f"{where} {_verb(str(gen.gi_frame.f_locals['query']))}"
    return f"{where} {NAMES[code]}" if code in NAMES else None


LOOKING_FOR_WORK = ("lane.py", "claim.py", "take_over.py", "checks.py", "operators.py", "steps.py:release_left")
NAMES = {"_commit_gen": "COMMIT", "_rollback_gen": "ROLLBACK", "_enter_gen": "BEGIN", "_exit_gen": "END"}


def _is_decisive(label: str) -> bool:
    return not label.startswith(LOOKING_FOR_WORK) and not label.endswith("SELECT")


WRITES = re.compile(r"(?<!FOR )(?<!DO )\b(INSERT INTO|UPDATE|DELETE FROM) (\w+)")


def _verb(statement: str) -> str:
    found = WRITES.search(statement)
    return f"{found[1]} {found[2]}" if found else statement.split(None, 1)[0]


def _caller() -> str | None:
    """Return the file and the function whose statement this is."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith((OUTBOX, HERE)) and file != __file__:
            return f"{Path(file).name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return None
