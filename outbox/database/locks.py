"""All advisory locks of the outbox. This module does not import Django, because the pipeline's jobs take locks without Django."""

from __future__ import annotations

import enum


class Lock(enum.IntEnum):
    """
    The first number of an advisory lock. Each comment says who takes the lock; after the semicolon, what the second number is.

    A number that is missing here is free. SQL contains the number: `f"SELECT pg_advisory_xact_lock({Lock.ORDERED_CLAIM}, 0)"`.
    """

    LANE = 7707  # a relay, while it runs; the lane
    ORDERED_CLAIM = 7708  # claims of ordered topics, one after the other; 0
    KEY = 7709  # publishers of a key on ordered topics; the key's hash
    GAPS = 7710  # searches for missing numbers; the group's hash
    PARTITIONS = 7711  # transactions that create or drop partitions of the message table; 0
    ARCHIVE = 7712  # archivers of a database; 0
    RECORDER = 7713  # recorders of a broker; the broker's hash
    PRUNE = 7715  # pruning of a database; 0
    AUDIT = 7716  # audits of a database; 0
    RESEND = 7717  # resending of messages after an audit; 0
    TOPIC_KEYS = 7718  # publishers on an ordered topic (shared), a publisher of very many keys (exclusive); the topic's id
    INBOX = 7719  # a consumer group's work on a message; the hash of group and idempotency key
    ORDER = 7720  # a consumer group's work on a key of an ordered topic; the hash of group, topic and key
    HALF_FIRST = 7721  # the transaction of a message that is sent half first (shared), so that the admin finds it; the id's hash
    BROKER_TOPIC = 7724  # in the embedded broker: groups that begin to read a topic (shared), its pruning (exclusive); its id


# Only one transaction at a time creates or drops partitions of the message table.
LOCK_PARTITIONS = f"SELECT pg_advisory_xact_lock({Lock.PARTITIONS}, 0)"

# Whether no relay holds a lane, because the last relay that held it has ended or died. `lane`: SQL for the lane's number.
IS_LANE_FREE = f"""NOT EXISTS (
    SELECT 1 FROM pg_locks held WHERE held.locktype = 'advisory' AND held.granted
    AND held.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND held.classid = {Lock.LANE} AND held.objid = {{lane}})"""

# A process may freeze at any point: it is stopped or swapped out, or its machine is paused. If it holds a lock that others need,
# the server ends its transaction or session after these timeouts. A running process needs only milliseconds between two
# statements of such a transaction; a process with a long session sends a statement periodically (`keep_alive`).
END_IDLE_TRANSACTION = "SET LOCAL idle_in_transaction_session_timeout = '1s'"
IDLE_SESSION_SECONDS = 300
END_IDLE_SESSION = f"SET idle_session_timeout = '{IDLE_SESSION_SECONDS}s'"
