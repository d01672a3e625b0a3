"""What each answer of the server's means for a message. Needs no server."""

import grpc
import pytest

from outbox.brokers.base import Ended, SendResult, SendStatus
from outbox.brokers.rocketmq.errors import StatusError
from outbox.brokers.rocketmq.remoting.frames import RemotingAnswer
from outbox.brokers.rocketmq.statuses import NO_BROKERS, status_before_send, status_of, status_of_end, status_of_send
from outbox.brokers.rocketmq.stubs import Code, definition

REFUSED, MISCONFIGURED, UNAVAILABLE, UNSURE = (
    SendStatus.REFUSED,
    SendStatus.MISCONFIGURED,
    SendStatus.UNAVAILABLE,
    SendStatus.UNSURE,
)


def status(code: int, text: str = "") -> StatusError:
    return StatusError(definition.Status(code=code, message=text))


def rpc(code: grpc.StatusCode, text: str = "") -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), text)


class TestStatus:
    @pytest.mark.parametrize("code", sorted(set(Code.values()) - {Code.OK, Code.MULTIPLE_RESULTS}))
    def test_never_says_that_a_message_was_accepted(self, code: int):
        assert status_of(status(code)).status is not SendStatus.ACCEPTED

    @pytest.mark.parametrize(
        ("code", "verdict"),
        [
            ("ILLEGAL_MESSAGE_TAG", REFUSED),
            ("ILLEGAL_MESSAGE_KEY", REFUSED),
            ("ILLEGAL_MESSAGE_GROUP", REFUSED),
            ("ILLEGAL_MESSAGE_PROPERTY_KEY", REFUSED),
            ("MESSAGE_BODY_TOO_LARGE", REFUSED),
            ("MESSAGE_BODY_EMPTY", REFUSED),
            ("MESSAGE_PROPERTIES_TOO_LARGE", REFUSED),
            ("TOPIC_NOT_FOUND", MISCONFIGURED),
            ("ILLEGAL_TOPIC", MISCONFIGURED),
            ("MESSAGE_PROPERTY_CONFLICT_WITH_TYPE", MISCONFIGURED),
            ("UNAUTHORIZED", MISCONFIGURED),
            ("FORBIDDEN", MISCONFIGURED),
            ("VERSION_UNSUPPORTED", MISCONFIGURED),
            ("ILLEGAL_DELIVERY_TIME", MISCONFIGURED),  # by the server's clock and limit: later it can go
            ("TOO_MANY_REQUESTS", UNAVAILABLE),
            ("MASTER_PERSISTENCE_TIMEOUT", UNSURE),  # stored, and perhaps not on the disk
            ("SLAVE_PERSISTENCE_TIMEOUT", UNSURE),
            ("HA_NOT_AVAILABLE", UNSURE),
            ("PROXY_TIMEOUT", UNSURE),
            ("REQUEST_TIMEOUT", UNSURE),
            ("INTERNAL_ERROR", UNSURE),
            ("INTERNAL_SERVER_ERROR", UNSURE),
            ("MESSAGE_CORRUPTED", UNSURE),  # on its way; the next try may be better
            ("CODE_UNSPECIFIED", UNSURE),
        ],
    )
    def test_decides(self, code: str, verdict: SendStatus):
        assert status_of(status(Code.Value(code))).status is verdict

    @pytest.mark.parametrize(
        ("text", "verdict"),
        [
            ("the message is illegal, maybe msg body or properties length not matched", REFUSED),
            ("connect to 127.0.0.1:10911 failed", UNAVAILABLE),
            ("send request to 127.0.0.1:10911 failed", UNSURE),
            ("service not available now. It may be caused by one of the following reasons", UNSURE),
        ],
    )
    def test_is_read_where_the_code_says_little(self, text: str, verdict: SendStatus):
        assert status_of(status(Code.INTERNAL_SERVER_ERROR, text)).status is verdict

    def test_of_a_topic_while_no_broker_is_known_is_an_outage(self):
        assert status_before_send(status(Code.TOPIC_NOT_FOUND, NO_BROKERS)).status is UNAVAILABLE

    def test_names_code_and_text(self):
        assert status_of(status(Code.TOPIC_NOT_FOUND, "No such topic")).reason == "RocketMQ says 40402 No such topic."

    def test_is_the_same_text_for_all_messages_that_are_too_many(self):
        texts = {status_of(status(Code.TOO_MANY_REQUESTS, f"period in queue: {n}ms")).reason for n in range(3)}

        assert len(texts) == 1


class TestRpc:
    @pytest.mark.parametrize(
        ("code", "text", "verdict"),
        [
            (grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses; last error: Connection refused", UNAVAILABLE),
            (grpc.StatusCode.UNAVAILABLE, "DNS resolution failed for proxy:8081", UNAVAILABLE),
            (grpc.StatusCode.UNAVAILABLE, "Socket closed", UNSURE),
            (grpc.StatusCode.UNAVAILABLE, "recvmsg:Connection reset by peer", UNSURE),
            (grpc.StatusCode.UNAVAILABLE, "", UNSURE),
            (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", UNSURE),
            (grpc.StatusCode.CANCELLED, "", UNSURE),
            (grpc.StatusCode.INTERNAL, "", UNSURE),
            (grpc.StatusCode.RESOURCE_EXHAUSTED, "", UNSURE),
            (grpc.StatusCode.UNIMPLEMENTED, "Method not found", MISCONFIGURED),
            (grpc.StatusCode.UNAUTHENTICATED, "", MISCONFIGURED),
            (grpc.StatusCode.PERMISSION_DENIED, "", MISCONFIGURED),
        ],
    )
    def test_decides(self, code: grpc.StatusCode, text: str, verdict: SendStatus):
        assert status_of(rpc(code, text)).status is verdict

    def test_leaves_anything_else_unsure(self):
        assert status_of(IndexError("no entry")).status is UNSURE


def answer(code: int, text: str = "") -> RemotingAnswer:
    return RemotingAnswer(code, text, {}, b"")


class TestAnswerToSend:
    @pytest.mark.parametrize(
        ("code", "verdict"),
        [
            (13, REFUSED),  # the message is illegal
            (3, MISCONFIGURED),  # the server does not know the request
            (16, MISCONFIGURED),  # no right
            (17, MISCONFIGURED),  # no such topic
            (2, UNAVAILABLE),  # busy
            (215, UNAVAILABLE),  # flow control
            (1, UNSURE),
            (10, UNSURE),  # stored, and perhaps not on the disk
            (11, UNSURE),
            (12, UNSURE),  # stored, and perhaps not at a replica
            (14, UNSURE),  # shutting down
            (999, UNSURE),
        ],
    )
    def test_decides(self, code: int, verdict: SendStatus):
        outcome = status_of_send(answer(code, "no"))

        assert outcome == SendResult(verdict, reason=f"RocketMQ says {code} no.")


class TestAnswerToEnd:
    """Source: docs/brokers/rocketmq.md; "not done" must be sure, for what is not may be ended again."""

    @pytest.mark.parametrize("ended", [Ended.COMMITTED, Ended.ROLLED_BACK])
    def test_that_all_is_well_says_how_the_half_message_stands(self, ended: Ended):
        assert status_of_end(answer(0), ended) == SendResult(SendStatus.ACCEPTED, ended=ended)

    @pytest.mark.parametrize(
        "text",
        [
            "Find prepared transaction message failed",
            "The transaction state table offset wrong",
            "The commit log offset wrong",
            "The producer group wrong",
        ],
    )
    def test_that_this_is_not_the_half_message_says_that_it_is_not_there(self, text: str):
        outcome = status_of_end(answer(1, text), Ended.COMMITTED)

        assert (outcome.status, outcome.ended) == (SendStatus.ACCEPTED, Ended.NOT_FOUND)
        assert text in outcome.reason

    @pytest.mark.parametrize(
        ("code", "verdict"),
        [
            (2, UNAVAILABLE),
            (215, UNAVAILABLE),
            (11, UNAVAILABLE),
            (14, UNAVAILABLE),
            (604, UNAVAILABLE),
            (3, MISCONFIGURED),
            (16, MISCONFIGURED),
            (17, MISCONFIGURED),
            (1, UNSURE),  # the store failed
            (10, UNSURE),
            (12, UNSURE),
            (999, UNSURE),
        ],
    )
    def test_decides(self, code: int, verdict: SendStatus):
        outcome = status_of_end(answer(code, "store putMessage return null"), Ended.COMMITTED)

        assert (outcome.status, outcome.ended) == (verdict, None)
        assert f"RocketMQ says {code} store" in outcome.reason
