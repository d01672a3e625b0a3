"""All advisory locks of the outbox. This module does not import Django, because jobs of the pipeline take locks, too."""

from __future__ import annotations

import enum


class Lock(enum.IntEnum):
    """
    The first number of an advisory lock. The comment of each says what the second number is.

    A number that is missing here is free. In SQL it is a literal: `f"SELECT pg_advisory_xact_lock({Lock.ORDERED_CLAIM}, 0)"`.
    """

    LANE = 7707  # held by a relay as long as it runs; its lane
    ORDERED_CLAIM = 7708  # claims of ordered topics, one after the other; 0
    KEY = 7709  # publishers of a key on ordered topics; its hash
    GAPS = 7710  # searches for missing numbers; the group's hash
    PARTITIONS = 7711  # partitions of the message table, created and dropped; 0
    ARCHIVE = 7712  # archivers of a database; 0
    RECORDER = 7713  # recorders of a broker; its hash
    PRUNE = 7715  # prunes of a database; 0
    AUDIT = 7716  # audits of a database; 0
    RESEND = 7717  # messages resent after an audit; 0
    TOPIC_KEYS = 7718  # shared by publishers on an ordered topic, exclusive for a publisher of very many keys; the topic's id
    INBOX = 7719  # a consumer group's work on a message; the hash of group and idempotency key
    ORDER = 7720  # a consumer group's work on a key of an ordered topic; the hash of group, topic and key
    HALF_FIRST = 7721  # shared, by the transaction of a message that went half first, for the admin to find it; the id's hash
    BROKER_TOPIC = 7724  # topic of the embedded broker: shared by groups that begin to read it, exclusive for its prune; its id


# One transaction at a time creates and drops partitions of the message table.
LOCK_PARTITIONS = f"SELECT pg_advisory_xact_lock({Lock.PARTITIONS}, 0)"

# Whether no relay holds a lane, since its last holder has ended or died. `lane`: SQL for its number.
IS_LANE_FREE = f"""NOT EXISTS (
    SELECT 1 FROM pg_locks held WHERE held.locktype = 'advisory' AND held.granted
    AND held.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND held.classid = {Lock.LANE} AND held.objid = {{lane}})"""

# A process may freeze at any point: stopped, swapped out, its machine paused. If it holds a lock that others need, the server
# ends its transaction or session after these time-outs. A running process takes milliseconds between two statements of such a
# transaction; a long session sends a statement now and then (`kept_alive`).
END_IDLE_TRANSACTION = "SET LOCAL idle_in_transaction_session_timeout = '1s'"
IDLE_SESSION_SECONDS = 300
END_IDLE_SESSION = f"SET idle_session_timeout = '{IDLE_SESSION_SECONDS}s'"
END_IDLE_SNAPSHOT = f"SET LOCAL idle_in_transaction_session_timeout = '{IDLE_SESSION_SECONDS}s'"
