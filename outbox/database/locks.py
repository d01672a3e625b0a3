"""Every advisory lock that the outbox takes. Without Django: the pipeline's jobs take some, too."""

from __future__ import annotations

import enum


class Lock(enum.IntEnum):
    """
    The first of the two numbers of an advisory lock; the second one says which of its kind.

    In SQL it stands as a literal: `f"SELECT pg_advisory_xact_lock({Lock.ORDERED_CLAIM}, 0)"`.
    """

    LANE = 7707  # held by a relay as long as it lives; the second number is its lane
    ORDERED_CLAIM = 7708  # claims of ordered topics, one after the other; 0
    KEY = 7709  # publishers of a key on ordered topics; its hash
    TOPIC_KEYS = 7718  # shared by publishers on an ordered topic, held alone by one of very many keys; the topic's id
    INBOX = 7719  # a consumer group's work on a message; the hash of group and dedupe key
    ORDER = 7720  # a consumer group's work on a key of an ordered topic; the hash of group, topic and key
    GAPS = 7710  # looks for missing numbers; the group's hash
    PARTITIONS = 7711  # days of the message table, made and dropped; 0
    ARCHIVE = 7712  # archivers of a database; 0
    RECORDER = 7713  # recorders of a broker; its hash
    PRUNE = 7715  # prunes of a database; 0
    AUDIT = 7716  # audits of a database; 0
    BROKER_TOPIC = 7724  # of a broker that keeps tables: shared by groups that begin in it, held alone by its prune; its id
    RESEND = 7717  # messages sent again for an audit; 0


# One at a time makes and drops days of the message table; the lock ends with the transaction.
LOCK_PARTITIONS = f"SELECT pg_advisory_xact_lock({Lock.PARTITIONS}, 0)"

# Whether nobody holds a lane: the relay that held it has ended, however it ended. `lane`: SQL for its number.
IS_LANE_FREE = f"""NOT EXISTS (
    SELECT 1 FROM pg_locks l WHERE l.locktype = 'advisory' AND l.granted
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND l.classid = {Lock.LANE} AND l.objid = {{lane}})"""

# A process may stand still at any point: stopped, swapped out, its machine paused. Where it holds a lock that others wait
# for, the server takes it away: its transaction, or its session, is ended. Between two statements of a transaction that others
# wait for lie milliseconds; a session that lasts says now and then that it is there (`kept_alive`).
END_IDLE_TRANSACTION = "SET LOCAL idle_in_transaction_session_timeout = '1s'"
IDLE_SESSION_SECONDS = 300
END_IDLE_SESSION = f"SET idle_session_timeout = '{IDLE_SESSION_SECONDS}s'"
END_IDLE_SNAPSHOT = f"SET LOCAL idle_in_transaction_session_timeout = '{IDLE_SESSION_SECONDS}s'"
