"""Maps the server's answers and errors to a `SendStatus`. Source: apache/rocketmq-apis definition.proto, Code."""

from __future__ import annotations

import grpc

from outbox.brokers.base import Ended, SendResult, SendStatus
from outbox.brokers.rocketmq.errors import StatusError
from outbox.brokers.rocketmq.remoting.frames import RemotingAnswer
from outbox.brokers.rocketmq.remoting.requests import NO_PERMISSION, NO_SUCH_TOPIC, SYSTEM_BUSY, SYSTEM_ERROR
from outbox.brokers.rocketmq.stubs import Code

# The message itself can never be accepted.
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

# An operator must act; until then no message of the topic can be sent.
MISCONFIGURED = {
    Code.BAD_REQUEST,
    Code.ILLEGAL_ACCESS_POINT,
    Code.ILLEGAL_TOPIC,
    Code.ILLEGAL_CONSUMER_GROUP,
    Code.ILLEGAL_DELIVERY_TIME,  # beyond the server's limit by its clock; accepted later
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

# The server rejects a message before it stores anything. The reason is a constant, because messages with different reasons are
# split into different batches, and the server's text has other times and sizes for each message.
FLOW_CONTROL = Code.TOO_MANY_REQUESTS
FLOW_CONTROLLED = f"RocketMQ applies flow control ({FLOW_CONTROL}); sending is retried soon."

ILLEGAL_MESSAGE = "the message is illegal"  # the text of 50001 for an id or properties that are too long
NO_BROKERS = "No name server knows a broker."  # the text of a TOPIC_NOT_FOUND that is an outage: all brokers are down
CONNECTING_TEXTS = ("failed to connect", "connection refused", "connect to", "dns resolution failed", "name resolution")


# Codes of a broker's answers in the remoting protocol. Source: apache/rocketmq ResponseCode.
FLOW_CONTROL_CODES = {SYSTEM_BUSY, 215}  # rejected before anything was done
# A commit or rollback was not carried out: the broker applies flow control, is a slave (11), is shutting down (14), or leaves the
# half message to check-backs, because the request came too late (604).
NOT_DONE_CODES = {*FLOW_CONTROL_CODES, 11, 14, 604}
MISCONFIGURED_CODES = {3, NO_PERMISSION, NO_SUCH_TOPIC}  # 3: request code not supported
ILLEGAL_CODE = 13

# Texts in a broker's answer to a commit or rollback, one of which says that the half message is not at the given place.
HALF_NOT_FOUND = ("find prepared transaction message failed", "offset wrong", "producer group wrong")


def status_of_send(answer: RemotingAnswer) -> SendResult:
    """Return the result of a send that a broker answered with an error."""
    reason = f"RocketMQ says {answer.code} {answer.text}."
    if answer.code == ILLEGAL_CODE:
        return SendResult(SendStatus.REFUSED, reason=reason)
    if answer.code in MISCONFIGURED_CODES:
        return SendResult(SendStatus.MISCONFIGURED, reason=reason)
    if answer.code in FLOW_CONTROL_CODES:
        return SendResult(SendStatus.UNAVAILABLE, reason=reason)
    return SendResult(SendStatus.UNSURE, reason=reason)  # also: stored and not flushed, stored and not replicated


def status_of_end(answer: RemotingAnswer, ended: Ended) -> SendResult:
    """
    Return the result of an end (commit or rollback) from a broker's answer.

    Args:
        ended: how the half message has ended if the answer is OK.
    """
    if answer.code == 0:
        return SendResult(SendStatus.ACCEPTED, ended=ended)
    reason = f"RocketMQ says {answer.code} {answer.text}."
    if answer.code == SYSTEM_ERROR and any(words in answer.text.lower() for words in HALF_NOT_FOUND):
        return SendResult(SendStatus.ACCEPTED, ended=Ended.NOT_FOUND, reason=reason)
    if answer.code in NOT_DONE_CODES:
        return SendResult(SendStatus.UNAVAILABLE, reason=reason)
    if answer.code in MISCONFIGURED_CODES:
        return SendResult(SendStatus.MISCONFIGURED, reason=reason)
    return SendResult(SendStatus.UNSURE, reason=reason)  # the store failed


def status_of(error: Exception) -> SendResult:
    """Return the result of a send that raised an error. UNSURE if the message may be stored."""
    if is_flow_control(error):
        return SendResult(SendStatus.UNAVAILABLE, reason=FLOW_CONTROLLED)
    if isinstance(error, StatusError):
        return SendResult(_of_status(error), reason=f"RocketMQ says {error}.")
    if isinstance(error, grpc.aio.AioRpcError):
        return SendResult(_of_rpc(error), reason=f"No answer from RocketMQ: {error.code().name} {error.details()}.")
    return SendResult(SendStatus.UNSURE, reason=f"{type(error).__name__}: {error}")


def status_before_send(error: Exception) -> SendResult:
    """Return the result of a send that raised an error before the message was sent, so that it is certainly not stored."""
    outcome = status_of(error)
    if outcome.status is SendStatus.UNSURE and isinstance(error, (StatusError, grpc.aio.AioRpcError)):
        return SendResult(SendStatus.UNAVAILABLE, reason=f"Not sent: {outcome.reason}")
    return outcome


def is_flow_control(error: Exception) -> bool:
    """Return whether the server applies flow control."""
    return isinstance(error, StatusError) and error.code == FLOW_CONTROL


def _of_status(error: StatusError) -> SendStatus:
    if error.code in REFUSED or ILLEGAL_MESSAGE in error.text.lower():
        return SendStatus.REFUSED
    if error.text == NO_BROKERS:
        return SendStatus.UNAVAILABLE
    if error.code in MISCONFIGURED:
        return SendStatus.MISCONFIGURED
    if error.code == Code.INTERNAL_SERVER_ERROR and _is_about_connecting(error.text):
        return SendStatus.UNAVAILABLE
    return SendStatus.UNSURE  # also: stored and not flushed, stored and not replicated, timed out


def _of_rpc(error: grpc.aio.AioRpcError) -> SendStatus:
    """Return UNAVAILABLE if there was no connection, and UNSURE if it was lost, since the message may be stored then."""
    if error.code() in MISCONFIGURED_RPC:
        return SendStatus.MISCONFIGURED
    is_unreachable = error.code() is grpc.StatusCode.UNAVAILABLE and _is_about_connecting(error.details() or "")
    return SendStatus.UNAVAILABLE if is_unreachable else SendStatus.UNSURE


def _is_about_connecting(text: str) -> bool:
    return any(words in text.lower() for words in CONNECTING_TEXTS)
