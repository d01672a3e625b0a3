"""Heartbeats: each relay, consumer and checker updates a row regularly."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta

import msgspec
from msgspec.structs import asdict
from psycopg.types.json import Jsonb

from outbox import conf
from outbox.database import Connection
from outbox.logs import cut, storable

BEAT_SECONDS = 2.0  # the interval, except for relays, which send one each second
SILENT_AFTER = timedelta(seconds=8)  # without a heartbeat: the process was killed, is frozen, or busy for that long
SWEEP = "sweep"  # the kind of heartbeats that relays of Celery's beat send
WAKEUP = "wakeup"  # that of workers of Celery which took a wakeup, and did not relay because other relays hold all lanes
BY_CELERY = "celery"  # the note of a process that sends heartbeats only during a task
STALE_AFTER = timedelta(minutes=5)
CONSUMER_STALE_AFTER = timedelta(hours=1)  # longer, because consuming/subscriptions.py reads the subscriptions of past consumers

# Containers on one network may have the same host name and process id; a new process deletes the old row of its predecessor.
FORGET_BEFORE = """
WITH before AS (
    DELETE FROM outbox_process WHERE kind = %(kind)s AND host = %(host)s AND pid = %(pid)s AND broker = %(broker)s
      AND consumer_group = %(group)s AND instance <> %(instance)s AND beat_at < clock_timestamp() - interval '1 minute'
)
"""

BEAT = """
INSERT INTO outbox_process (kind, host, pid, instance, broker, server, consumer_group, lane, breaker, note, subscriptions,
    refusals, errors, handling)
VALUES (%(kind)s, %(host)s, %(pid)s, %(instance)s, %(broker)s, %(server)s, %(group)s, %(lane)s, %(breaker)s, %(note)s,
    %(subscriptions)s, %(refusals)s, %(errors)s, %(handling)s)
ON CONFLICT (kind, host, pid, instance, broker, consumer_group) DO UPDATE
SET lane = excluded.lane, breaker = excluded.breaker, note = excluded.note, subscriptions = excluded.subscriptions,
    refusals = excluded.refusals, errors = excluded.errors, handling = excluded.handling, beat_at = clock_timestamp()
"""

LEAVE = "DELETE FROM outbox_process WHERE kind = %s AND instance = %s AND broker = %s AND consumer_group = %s"

# The newest row counts: a host may run several processes, and killed ones leave rows behind.
SILENCE = """
SELECT extract(epoch FROM clock_timestamp() - max(beat_at))::float8 FROM outbox_process WHERE kind = %s AND host = %s
"""

FORGET_STALE = """
DELETE FROM outbox_process
WHERE beat_at < clock_timestamp() - CASE WHEN kind = 'consumer' THEN greatest(%(after)s, %(of_consumers)s) ELSE %(after)s END
"""


class Handling(msgspec.Struct, frozen=True):
    """
    A handler of a consumer that is running.

    Args:
        message_id: the message that it handles, or the first one of several.
        handler: the name of its function.
        seconds: for how long it has been running.
        limit_seconds: its time limit.
    """

    topic: str
    message_id: str
    handler: str
    seconds: float
    limit_seconds: float | None = None


def instance() -> str:
    """Return a name that is unique to this process."""
    return f"{os.getpid()}-{_started}"


def _begin() -> None:
    global _started
    _started = uuid.uuid4().hex[:12]


_started = ""
_begin()
os.register_at_fork(after_in_child=_begin)


def beat(
    connection: Connection,
    kind: str,
    *,
    broker: str = "",
    consumer_group: str = "",
    lane: int | None = None,
    breaker: str = "closed",
    note: str = "",
    subscriptions: Sequence[str] = (),
    refusals: Mapping[str, str] | None = None,
    errors: Mapping[str, str] | None = None,
    handling: Handling | None = None,
    inserts_only: bool = False,
) -> None:
    """
    Send a heartbeat of this process, as a relay, consumer or checker (`kind`) of a broker and a consumer group.

    Args:
        note: what hosts it, for operators to read.
        subscriptions: the subscriptions of a consumer: `consuming/subscriptions.py`.
        refusals: the topics that a consumer cannot receive from, each with the reason.
        inserts_only: leave the row of a predecessor, for a process that may lack permissions.
        handling: the handler of a consumer that has been running for the longest time.
        errors: the last errors of loops of this process: `loop_errors.py`.
    """
    who = {"kind": kind, "host": socket.gethostname(), "pid": os.getpid(), "instance": instance()}
    what = {
        "broker": broker,
        "server": conf.server(broker),
        "group": consumer_group,
        "lane": lane,
        "breaker": breaker,
        "note": note,
        "subscriptions": list(subscriptions),
    }
    said = {"refusals": refusals or {}, "errors": errors or {}}
    texts = {name: Jsonb({key: cut(storable(text)) for key, text in texts_of.items()}) for name, texts_of in said.items()}
    work = {"handling": Jsonb(asdict(handling) if handling else {})}
    connection.execute(BEAT if inserts_only else FORGET_BEFORE + BEAT, who | what | texts | work)


def leave(connection: Connection, kind: str, *, broker: str = "", consumer_group: str = "") -> None:
    """Delete the row of this process, which ends normally."""
    connection.execute(LEAVE, [kind, instance(), broker, consumer_group])


def silence(connection: Connection, kind: str) -> float | None:
    """Return the seconds since the last heartbeat of a process of that kind on this host; None: no process has a row."""
    row = connection.execute(SILENCE, [kind, socket.gethostname()]).fetchone()
    return row[0] if row else None


def forget_stale(connection: Connection) -> int:
    """Delete the rows of processes that have been silent for long; return how many."""
    return connection.execute(FORGET_STALE, {"after": STALE_AFTER, "of_consumers": CONSUMER_STALE_AFTER}).rowcount
