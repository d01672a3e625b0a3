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

BEAT_SECONDS = 2.0  # the interval; relays send a heartbeat each second
SILENT_AFTER = timedelta(seconds=8)  # a process without heartbeats for longer was killed, is frozen, or is too busy
SWEEP = "sweep"  # the kind of heartbeats of the sweep that Celery's beat starts
WAKEUP = "wakeup"  # the kind of heartbeats of Celery workers that took a wakeup and did not relay, since others hold all lanes
BY_CELERY = "celery"  # the `note` of a process that sends heartbeats only during a task
STALE_AFTER = timedelta(minutes=5)
CONSUMER_STALE_AFTER = timedelta(hours=1)  # longer, because consuming/subscriptions.py reads the subscriptions of past consumers

# Delete the rows of an earlier process with this host name and process id: a restarted container may have the same two as before.
# A row with a recent heartbeat stays, because two running containers on one network may also have the same two.
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

# Only the newest row counts, because a host may run several processes, and killed processes leave rows behind.
SILENCE = """
SELECT extract(epoch FROM clock_timestamp() - max(beat_at))::float8 FROM outbox_process WHERE kind = %s AND host = %s
"""

FORGET_STALE = """
DELETE FROM outbox_process
WHERE beat_at < clock_timestamp() - CASE WHEN kind = 'consumer' THEN greatest(%(after)s, %(of_consumers)s) ELSE %(after)s END
"""


class Handling(msgspec.Struct, frozen=True):
    """
    A running handler of a consumer.

    Args:
        message_id: the id of the message that is handled, or of the first of several.
        handler: the name of the handler's function.
        seconds: for how long the handler has been running.
        limit_seconds: the handler's time limit.
    """

    topic: str
    message_id: str
    handler: str
    seconds: float
    limit_seconds: float | None = None


def instance() -> str:
    """Return a name that is unique to this process."""
    return f"{os.getpid()}-{_random_id}"


def _draw_random_id() -> None:
    global _random_id
    _random_id = uuid.uuid4().hex[:12]


_random_id = ""
_draw_random_id()
os.register_at_fork(after_in_child=_draw_random_id)


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
    Write a heartbeat of this process, as a relay, consumer or checker (`kind`) of a broker and a consumer group.

    Args:
        note: a text for operators about the program that hosts the relay, consumer or checker.
        subscriptions: the subscriptions of a consumer, in the format of `consuming/subscriptions.py`.
        refusals: the topics that a consumer cannot receive from, each with the reason.
        errors: the last errors of loops of this process, as `loop_errors.read` returns them.
        handling: the handler of a consumer that has been running for the longest time.
        inserts_only: keep the rows of earlier processes, for a process that may lack the permission to delete.
    """
    identity = {"kind": kind, "host": socket.gethostname(), "pid": os.getpid(), "instance": instance()}
    state = {
        "broker": broker,
        "server": conf.server(broker),
        "group": consumer_group,
        "lane": lane,
        "breaker": breaker,
        "note": note,
        "subscriptions": list(subscriptions),
    }
    problems = {"refusals": refusals or {}, "errors": errors or {}}
    texts = {name: Jsonb({key: cut(storable(text)) for key, text in texts_of.items()}) for name, texts_of in problems.items()}
    work = {"handling": Jsonb(asdict(handling) if handling else {})}
    connection.execute(BEAT if inserts_only else FORGET_BEFORE + BEAT, identity | state | texts | work)


def delete_heartbeat(connection: Connection, kind: str, *, broker: str = "", consumer_group: str = "") -> None:
    """Delete the heartbeat of this process, because the process ends normally."""
    connection.execute(LEAVE, [kind, instance(), broker, consumer_group])


def seconds_since_heartbeat(connection: Connection, kind: str) -> float | None:
    """Return the seconds since the last heartbeat of a process of that kind on this host; None if no process has a row."""
    row = connection.execute(SILENCE, [kind, socket.gethostname()]).fetchone()
    return row[0] if row else None


def forget_stale(connection: Connection) -> int:
    """Delete rows whose last heartbeat is older than five minutes, for consumers an hour; return how many."""
    return connection.execute(FORGET_STALE, {"after": STALE_AFTER, "of_consumers": CONSUMER_STALE_AFTER}).rowcount
