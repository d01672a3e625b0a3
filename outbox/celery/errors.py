"""
The results that errors of Celery's broker lead to. docs/how-to/celery-tasks.md has the same tables.

An outage means that the server cannot store any message now. The result is UNAVAILABLE, and the connection is closed, since
another server may take over the same address. A refusal concerns one task. Its result is MISCONFIGURED or REFUSED.
"""

from __future__ import annotations

import re

import amqp

from outbox.brokers.base import SendResult, SendStatus

UNAVAILABLE, MISCONFIGURED = SendStatus.UNAVAILABLE, SendStatus.MISCONFIGURED

REDIS_OUTAGES = frozenset(
    {
        "LOADING",  # the server reads its data after a start
        "OOM",  # maxmemory is reached
        "MISCONF",  # the server cannot write to its disk
        "READONLY",  # the server has become a replica
        "NOREPLICAS",  # fewer replicas than min-replicas-to-write
        "MASTERDOWN",  # a replica without its master
        "CLUSTERDOWN",
        "TRYAGAIN",
        "BUSY",  # a script runs
    }
)
"""
The prefixes of Redis' errors that are outages. Any other prefix (NOPERM, WRONGTYPE, MOVED, ERR) is a refusal.

Source: https://redis.io/docs/latest/develop/reference/protocol-spec/#simple-errors, and src/server.c.
"""

REDIS_CLASSES = {
    "BusyLoadingError": "LOADING",
    "ClusterDownError": "CLUSTERDOWN",
    "MasterDownError": "MASTERDOWN",
    "OutOfMemoryError": "OOM",
    "ReadOnlyError": "READONLY",
    "TryAgainError": "TRYAGAIN",
}
"""Prefixes of errors whose text in redis-py lacks the prefix. Classes are named by strings, since redis need not be installed."""

REDIS_REFUSES_LOGIN = {"AuthenticationError", "AuthenticationWrongNumberOfArgsError", "NoPermissionError"}

TOO_LARGE = (amqp.PreconditionFailed, amqp.ContentTooLarge)
"""
Errors with which RabbitMQ closes the channel because of a published message, which is then REFUSED. All other errors that close a
channel (403, 404, 405, and 406 of a declaration) are MISCONFIGURED.
"""

AMQP_OUTAGES = {
    320,  # CONNECTION_FORCED: the server shuts down, or an operator closes the connection
    506,  # RESOURCE_ERROR
}
"""
Reply codes with which RabbitMQ closes a connection for its own reasons. Any other code (501-505, 530, 540, 541) may be the answer
to a task. The task is then tried again alone, and if the connection is closed again, the task is MISCONFIGURED.

Source: https://www.rabbitmq.com/amqp-0-9-1-reference#constants.
"""

AMQP_FULL = re.compile(r"limit .*is reached|vhost '.*' is down")
"""The text of a refused login (530) that RabbitMQ may accept later."""

REDIS_CODE = re.compile(r"^(?:.*of pipeline caused error: )?([A-Z]{2,})\b", re.DOTALL)


def redis_code(error: BaseException) -> str:
    """Return the prefix of Redis' error, such as NOPERM; "" if it has none."""
    if code := getattr(error, "status_code", None) or REDIS_CLASSES.get(type(error).__name__):
        return str(code)
    match = REDIS_CODE.match(str(error))
    return match[1] if match else ""


def closed_by_server(error: BaseException | None) -> amqp.AMQPError | None:
    """Return the error with which RabbitMQ has closed the connection; None if the connection broke for another reason."""
    while error is not None:  # py-amqp may raise an error about its closed socket while it handles the server's error
        if isinstance(error, amqp.exceptions.ConnectionError) and error.reply_code:
            return error
        error = error.__context__
    return None


def not_connected(error: Exception) -> SendResult:
    """Return the result of messages that were not sent because the connection could not be opened."""
    is_refused = isinstance(error, amqp.AccessRefused | amqp.NotAllowed) or type(error).__name__ in REDIS_REFUSES_LOGIN
    is_refused = is_refused and not AMQP_FULL.search(str(error))
    return failed(MISCONFIGURED if is_refused else UNAVAILABLE, error)


def failed(status: SendStatus, error: BaseException) -> SendResult:
    """Return a result whose reason names an error in one line."""
    return SendResult(status, reason=" ".join(f"Celery's broker (CELERY_BROKER_URL): {type(error).__name__}: {error}".split()))


def no_queue(exchange: str, routing_key: str) -> SendResult:
    """Return the result of a message that would reach no queue."""
    target = f"exchange {exchange!r} with routing key {routing_key!r}" if exchange else f"queue {routing_key!r}"
    reason = f"Celery's broker has no queue for {target}. Start a worker with that queue, or correct the route."
    return SendResult(MISCONFIGURED, reason=reason)
