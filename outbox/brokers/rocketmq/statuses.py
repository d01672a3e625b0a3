"""What the server's answers mean for a message. Source: apache/rocketmq-apis definition.proto, Code."""

from __future__ import annotations

import grpc

from outbox.brokers.base import Ended, SendResult, SendStatus
from outbox.brokers.rocketmq.errors import StatusError
from outbox.brokers.rocketmq.remoting.frames import Answer
from outbox.brokers.rocketmq.remoting.requests import NO_PERMISSION, NO_SUCH_TOPIC, SYSTEM_BUSY, SYSTEM_ERROR
from outbox.brokers.rocketmq.stubs import Code

# This very message can never go.
REFUSED = {
    Code.ILLEGAL_MESSAGE_TAG,
    Code.ILLEGAL_MESSAGE_KEY,
    Code.ILLEGAL_MESSAGE_GROUP,
    Code.ILLEGAL_MESSAGE_PROPERTY_KEY,
    Code.ILLEGAL_MESSAGE_ID,
    Code.PAYLOAD_TOO_LARGE,
    Code.MESSAGE_BODY_TOO_LARGE,
    Code.MESSAGE_BODY_EMPTY,
    Code.REQUEST_HEADER_FIELDS_TOO_LARGE,
    Code.MESSAGE_PROPERTIES_TOO_LARGE,
}

# A person must act, and every message of the topic waits for it.
MISCONFIGURED = {
    Code.BAD_REQUEST,
    Code.ILLEGAL_ACCESS_POINT,
    Code.ILLEGAL_TOPIC,
    Code.ILLEGAL_CONSUMER_GROUP,
    Code.ILLEGAL_DELIVERY_TIME,  # by the server's limit and clock; it can go later
    Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
    Code.UNRECOGNIZED_CLIENT_TYPE,
    Code.UNAUTHORIZED,
    Code.PAYMENT_REQUIRED,
    Code.FORBIDDEN,
    Code.NOT_FOUND,
    Code.TOPIC_NOT_FOUND,
    Code.CONSUMER_GROUP_NOT_FOUND,
    Code.UNSUPPORTED,
    Code.VERSION_UNSUPPORTED,
    Code.NOT_IMPLEMENTED,
}
MISCONFIGURED_RPC = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,  # something else listens at the endpoint
}

# Turned away before anything was stored. Its text names times and sizes, another one for each message; messages that
# fare alike stay together only where the reason is the same.
FLOW_CONTROL = Code.TOO_MANY_REQUESTS
LESS = f"RocketMQ has no time now ({FLOW_CONTROL}), and is left alone for a while."

ILLEGAL_MESSAGE = "the message is illegal"  # the text of 50001 for an id or properties that are too long
NOT_CONNECTED = ("failed to connect", "connection refused", "connect to", "dns resolution failed", "name resolution")


# Answers of a broker's own port. Source: apache/rocketmq ResponseCode.
FLOW_CONTROL_CODES = {SYSTEM_BUSY, 215}  # turned away before anything was done
NOT_DONE_CODES = {*FLOW_CONTROL_CODES, 11, 14, 604}  # of an end: a slave, shutting down, too early
MISCONFIGURED_CODES = {3, NO_PERMISSION, NO_SUCH_TOPIC}  # 3: not known there
ILLEGAL_CODE = 13

# What a broker says of an end where the half message is not.
NOT_THAT_HALF = ("find prepared transaction message failed", "offset wrong", "producer group wrong")


def status_of_send(answer: Answer) -> SendResult:
    """Return what a broker's answer to a send means that is not 0."""
    reason = f"RocketMQ says {answer.code} {answer.text}."
    if answer.code == ILLEGAL_CODE:
        return SendResult(SendStatus.REFUSED, reason=reason)
    if answer.code in MISCONFIGURED_CODES:
        return SendResult(SendStatus.MISCONFIGURED, reason=reason)
    if answer.code in FLOW_CONTROL_CODES:
        return SendResult(SendStatus.UNAVAILABLE, reason=reason)
    return SendResult(SendStatus.UNSURE, reason=reason)  # also: stored and not flushed, stored and not replicated


def status_of_end(answer: Answer, ended: Ended) -> SendResult:
    """
    Return what a broker's answer to an end means.

    Args:
        ended: how the half message stands when all went well.
    """
    if answer.code == 0:
        return SendResult(SendStatus.ACCEPTED, ended=ended)
    reason = f"RocketMQ says {answer.code} {answer.text}."
    if answer.code == SYSTEM_ERROR and any(words in answer.text.lower() for words in NOT_THAT_HALF):
        return SendResult(SendStatus.ACCEPTED, ended=Ended.NOT_FOUND, reason=reason)
    if answer.code in NOT_DONE_CODES:
        return SendResult(SendStatus.UNAVAILABLE, reason=reason)
    if answer.code in MISCONFIGURED_CODES:
        return SendResult(SendStatus.MISCONFIGURED, reason=reason)
    return SendResult(SendStatus.UNSURE, reason=reason)  # the store failed


def status_of(error: Exception) -> SendResult:
    """Return what an error at a send means; what is not surely known is UNSURE."""
    if is_flow_control(error):
        return SendResult(SendStatus.UNAVAILABLE, reason=LESS)
    if isinstance(error, StatusError):
        return SendResult(_of_status(error), reason=f"RocketMQ says {error}.")
    if isinstance(error, grpc.aio.AioRpcError):
        return SendResult(_of_rpc(error), reason=f"No answer from RocketMQ: {error.code().name} {error.details()}.")
    return SendResult(SendStatus.UNSURE, reason=f"{type(error).__name__}: {error}")


def status_before_send(error: Exception) -> SendResult:
    """Return what an error means that came before the message left: it was surely not stored."""
    outcome = status_of(error)
    if outcome.status is SendStatus.UNSURE and isinstance(error, (StatusError, grpc.aio.AioRpcError)):
        return SendResult(SendStatus.UNAVAILABLE, reason=f"Not sent: {outcome.reason}")
    return outcome


def is_flow_control(error: Exception) -> bool:
    """Return whether the server asks for less."""
    return isinstance(error, StatusError) and error.code == FLOW_CONTROL


def _of_status(error: StatusError) -> SendStatus:
    if error.code in REFUSED or ILLEGAL_MESSAGE in error.text.lower():
        return SendStatus.REFUSED
    if error.code in MISCONFIGURED:
        return SendStatus.MISCONFIGURED
    if error.code == Code.INTERNAL_SERVER_ERROR and _is_about_connecting(error.text):
        return SendStatus.UNAVAILABLE
    return SendStatus.UNSURE  # also: stored and not flushed, stored and not replicated, time over


def _of_rpc(error: grpc.aio.AioRpcError) -> SendStatus:
    """A call that found no connection left nothing behind; one that lost it may have."""
    if error.code() in MISCONFIGURED_RPC:
        return SendStatus.MISCONFIGURED
    is_away = error.code() is grpc.StatusCode.UNAVAILABLE and _is_about_connecting(error.details() or "")
    return SendStatus.UNAVAILABLE if is_away else SendStatus.UNSURE


def _is_about_connecting(text: str) -> bool:
    return any(words in text.lower() for words in NOT_CONNECTED)
