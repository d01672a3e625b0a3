"""
Decide a check-back: was the transaction of this half message committed?

The answer is COMMIT or ROLLBACK only for a fact that cannot change any more. In all other cases it is UNKNOWN, and the broker
asks again. The decision tables are in docs/state-machine.md; `_judge` implements the table for existing batches,
`_judge_half_first` the one for half messages that were sent before their transactions wrote anything (half first).
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from uuid import UUID

import msgspec
from msgspec.structs import replace
from psycopg import errors
from psycopg.rows import namedtuple_row

from outbox import conf
from outbox.batches.fence import fence
from outbox.batches.half_first import Tombstone, read_half_first, write_tombstone
from outbox.check_backs.register import resolver_of
from outbox.check_backs.sources import READ_SOURCE, About, fields_of, look_up
from outbox.database import Connection
from outbox.database.guarded import close_all_broken
from outbox.errors import FenceLost
from outbox.logs import get_logger
from outbox.message import COMMIT, ROLLBACK, UNKNOWN, Half, Resolution, Token
from outbox.models import State

logger = get_logger("outbox.check_back")

# Read what the decision table needs to know about the batch that a token names, and about the position that it names. Times are
# compared with the database's clock. `is_being_ended`: the process that decided the batch, or took it over, may be committing the
# half messages now.
READ_BATCH = """
SELECT state, attempt, message_ids[%(position)s]::text AS message_id, half_ids[%(position)s] AS half_id,
       %(position)s = ANY(split) AS is_split, coalesce(lease_until < clock_timestamp(), false) AS is_lease_over,
       coalesce(ends_until > clock_timestamp(), false) AS is_being_ended
FROM outbox_batch WHERE id = %(batch)s
"""


class Answer(msgspec.Struct, frozen=True):
    """
    The answer to a check-back.

    Args:
        reason: an explanation for operators.
        about: whether the business row that the message names exists. Only operators see this; the resolution does not depend on
            it.
        is_alert: whether an operator has to look into the reason.
    """

    resolution: Resolution
    reason: str
    about: About = About.NONE
    is_alert: bool = False


def resolve(connection: Connection, half: Half) -> Answer:
    """
    Answer a check-back from the primary database.

    Args:
        connection: to the database that the token names, in autocommit and READ COMMITTED.

    Raises:
        psycopg.Error: the database did not answer in time. The caller turns this error into UNKNOWN.
    """
    source, is_read_only = connection.execute(READ_SOURCE).fetchone() or (None, True)
    if is_read_only:
        return _unknown("The database is a replica, in recovery or read-only; only the primary answers.", is_alert=True)
    answer = _answer_by_token(connection, half, source) if half.token else _answer_by_function(half)
    return replace(answer, about=look_up(connection, half.message_id))


def _answer_by_token(connection: Connection, half: Half, source: str) -> Answer:
    try:
        token = Token.parse(half.token)
    except ValueError:
        return _unknown(f"The token {half.token!r} cannot be read.", is_alert=True)
    if token.source != source:
        return _unknown(f"The token is of {token.source}, but this database is {source}.", is_alert=True)
    if token.is_half_first:
        return _answer_half_first(connection, half)
    while True:
        with connection.cursor(row_factory=namedtuple_row) as cursor:
            batch = cursor.execute(READ_BATCH, {"batch": token.batch, "position": token.position}).fetchone()
        if batch is None:  # something is wrong, since a batch is pruned only after the end of its half messages was confirmed
            return _unknown(f"Batch {token.batch} is missing: wrong database, or one restored to an older state?", is_alert=True)
        answer = _judge(batch, half, token)
        if answer is not None:
            return answer
        with suppress(FenceLost):  # another process has changed the batch's state; states only go forward, so the loop ends
            fence(connection, token.batch, token.attempt)
            return _rollback(f"The lease of batch {token.batch} was over, and it was taken back before a decision.")


def _judge(batch: Any, half: Half, token: Token) -> Answer | None:
    """
    Answer by the decision table, whose rows are tried in order.

    Return None if the lease of an undecided batch is over, so that the batch has to be fenced first.
    """
    named = f"Batch {token.batch}"
    if token.attempt > batch.attempt:
        return _unknown(
            f"{named} is at attempt {batch.attempt}, but the half message is of attempt {token.attempt}. Was the database "
            "restored to an older state?",
            is_alert=True,
        )
    if batch.message_id != half.message_id:
        return _unknown(f"{named} holds another message at position {token.position}.", is_alert=True)
    if token.attempt < batch.attempt:
        return _rollback(f"{named} is at attempt {batch.attempt}, but the half message is of attempt {token.attempt}.")
    if batch.state in (State.RELEASED, State.DEAD, State.DISCARDED):
        return _rollback(f"{named} is {State(batch.state).label.lower()}.")
    if batch.state == State.CLAIMED:
        return None if batch.is_lease_over else _unknown(f"{named} is being sent, and its lease is not over.")
    if batch.is_split:
        return _rollback(f"Position {token.position} was split from batch {token.batch}, so another half message carries it.")
    if batch.half_id != half.half_id:
        return _rollback(f"{named} was decided with another half message.")
    return _commit(f"{named} was decided with this half message.", is_being_ended=batch.is_being_ended)


def _answer_half_first(connection: Connection, half: Half) -> Answer:
    """Answer for a half message that was sent before the work of its transaction began (half first)."""
    try:
        message_id = UUID(half.message_id)
    except ValueError:
        return _unknown(f"The message id {half.message_id!r} cannot be read.", is_alert=True)
    try:
        tombstone = write_tombstone(connection, message_id, retention=conf.settings().retention)
    except errors.LockNotAvailable:
        return _unknown("Its transaction is still open.")
    except errors.CheckViolation:
        return _unknown("No partition accepts its message row, not even a default partition.", is_alert=True)
    if tombstone is Tombstone.WRITTEN:
        return _rollback("Its transaction has not committed, and cannot commit any more.")
    half_first = read_half_first(connection, message_id)
    if half_first is None and tombstone is Tombstone.UNWRITTEN:
        return _unknown(
            "The time in its id is in the future or older than RETENTION. If the message is not old, check the clocks.",
            is_alert=True,
        )
    if half_first is None:
        return _unknown("Its message row existed when a tombstone should be written, but does not exist any more.", is_alert=True)
    return _judge_half_first(half_first, half)


def _judge_half_first(row: Any, half: Half) -> Answer:
    if row.is_tombstone:
        return _rollback("Its transaction has not committed, and cannot any more, since an earlier check-back wrote a tombstone.")
    if row.batch is None:
        return _unknown("Its message row exists, but no batch contains it alone.", is_alert=True)
    named = f"Batch {row.batch}"
    if row.attempt != 1 or row.state not in (State.PREPARED, State.SENT):
        return _rollback(f"{named} was given up or is sent again. In the latter case, another half message carries the message.")
    if row.half_id != half.half_id:
        return _rollback(f"{named} was written with another half message.")
    return _commit(f"{named} was committed with this half message.", is_being_ended=row.is_being_ended)


def _answer_by_function(half: Half) -> Answer:
    """
    Ask the `@check_back` function of the topic, since another producer sent the half message.

    The function uses Django's connections. If earlier code left one inside a transaction, the function would see outdated data
    there, and its writes would not be committed. So such connections are closed before the call, and also after it.
    """
    function = resolver_of(half.topic)
    if function is None:
        return _unknown(
            f"The half message has no token, and topic {half.topic!r} has no @check_back function. Write one.",
            is_alert=True,
        )
    close_all_broken()  # closes connections that are inside a transaction
    try:
        resolution: object = function(half)
    except Exception as error:
        logger.exception(
            "The @check_back function of topic %r failed for message %s.",
            half.topic,
            half.message_id,
            extra=fields_of(half),
        )
        return _unknown(f"The @check_back function raised {type(error).__name__}.")
    if aliases := close_all_broken():
        return _unknown(
            f"The @check_back function of topic {half.topic!r} left a transaction of {', '.join(aliases)} open, which was rolled "
            "back.",
            is_alert=True,
        )
    if not isinstance(resolution, Resolution):
        return _unknown(
            f"The @check_back function of topic {half.topic!r} returned {resolution!r}, not COMMIT, ROLLBACK or UNKNOWN.",
            is_alert=True,
        )
    return Answer(resolution, f"The @check_back function of topic {half.topic!r} returned {resolution}.")


def _commit(reason: str, *, is_being_ended: bool) -> Answer:
    """Answer COMMIT, or UNKNOWN while another process may be committing the half message: two commits could make two copies."""
    if is_being_ended:
        return _unknown(f"{reason} Its commit may be in progress.")
    return Answer(COMMIT, reason)


def _rollback(reason: str) -> Answer:
    return Answer(ROLLBACK, reason)


def _unknown(reason: str, *, is_alert: bool = False) -> Answer:
    return Answer(UNKNOWN, reason, is_alert=is_alert)
