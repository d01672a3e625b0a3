"""What each error of Celery's broker means: the tables of docs/how-to/celery-tasks.md, row by row. Needs no server."""

from __future__ import annotations

from typing import Any

import amqp
import pytest
import redis
from amqp.exceptions import error_for_code
from redis._parsers.base import BaseParser

from outbox.brokers.base import SendStatus
from outbox.celery.confirms import ConfirmingProducer
from outbox.celery.direct import DirectProducer
from outbox.celery.errors import closed_by_server, not_connected, redis_code
from outbox.celery.stored import TaskMessage, decode
from tests.outbox.celery.app import app
from tests.outbox.celery.conftest import task

UNAVAILABLE, MISCONFIGURED = SendStatus.UNAVAILABLE, SendStatus.MISCONFIGURED

REDIS = [
    ("LOADING Redis is loading the dataset in memory", UNAVAILABLE),
    ("OOM command not allowed when used memory > 'maxmemory'.", UNAVAILABLE),
    ("MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.", UNAVAILABLE),
    ("READONLY You can't write against a read only replica.", UNAVAILABLE),
    ("NOREPLICAS Not enough good replicas to write.", UNAVAILABLE),
    ("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", UNAVAILABLE),
    ("CLUSTERDOWN The cluster is down", UNAVAILABLE),
    ("TRYAGAIN Multiple keys request during rehashing of slot", UNAVAILABLE),
    ("BUSY Redis is busy running a script.", UNAVAILABLE),
    ("ERR max number of clients reached", UNAVAILABLE),
    ("NOPERM this user has no permissions to access one of the keys used as arguments", MISCONFIGURED),
    ("WRONGTYPE Operation against a key holding the wrong kind of value", MISCONFIGURED),
    ("MOVED 3999 127.0.0.1:6381", MISCONFIGURED),
    ("CROSSSLOT Keys in request don't hash to the same slot", MISCONFIGURED),
    ("EXECABORT Transaction discarded because of previous errors.", MISCONFIGURED),
    ("ERR unknown command 'LPUSH'", MISCONFIGURED),
]

CLOSED = [
    (320, "CONNECTION_FORCED - broker forced connection closure", False),
    (501, "FRAME_ERROR - type 3", True),
    (502, "SYNTAX_ERROR", True),
    (503, "COMMAND_INVALID - unknown exchange type 'x'", True),
    (504, "CHANNEL_ERROR - expected 'channel.open'", True),
    (505, "UNEXPECTED_FRAME", True),
    (506, "RESOURCE_ERROR", False),
    (530, "NOT_ALLOWED", True),
    (540, "NOT_IMPLEMENTED - immediate=true", True),
    (541, "INTERNAL_ERROR", True),
]

LOGINS = [
    (amqp.AccessRefused("ACCESS_REFUSED - Login was refused", (10, 50), reply_code=403), MISCONFIGURED),
    (amqp.NotAllowed("NOT_ALLOWED - vhost x not found", (10, 50), reply_code=530), MISCONFIGURED),
    (amqp.NotAllowed("NOT_ALLOWED - access to vhost '/' refused: connection limit (1) is reached", (10, 50)), UNAVAILABLE),
    (amqp.NotAllowed("NOT_ALLOWED - access to vhost '/' refused for user 'u': vhost '/' is down", (10, 50)), UNAVAILABLE),
    (redis.AuthenticationError("invalid username-password pair or user is disabled."), MISCONFIGURED),
    (redis.ConnectionError("max number of clients reached"), UNAVAILABLE),
    (ConnectionRefusedError(111, "Connection refused"), UNAVAILABLE),
    (TimeoutError("timed out"), UNAVAILABLE),
]


class Failing:
    """A connection to Redis on which each declaration raises the same error."""

    channel_errors = (redis.ResponseError,)
    connection_errors = (redis.ConnectionError,)
    declared_entities: Any = set()

    def __init__(self, error: Exception) -> None:
        self.error = error

    def channel(self) -> Failing:
        return self


def parcels() -> list[TaskMessage]:
    return [TaskMessage(number, str(number), decode(task(number).body)) for number in range(2)]


def from_server(text: str) -> Exception:
    """Return what redis-py makes of an answer."""
    found: Exception = BaseParser.parse_error(text)
    return found


class TestAnswerOfRedis:
    @pytest.mark.parametrize(("text", "status"), REDIS, ids=[text.partition(" ")[0] for text, _ in REDIS])
    def test_is_an_outage_or_a_refusal_of_the_task(self, monkeypatch, text: str, status: SendStatus):
        error = from_server(text)
        monkeypatch.setattr("outbox.celery.direct.maybe_declare", _raising(error))
        producer = DirectProducer(app, Failing(error), lambda: False)

        results = [result for _, result in producer.publish(parcels(), float("inf"))]

        assert [one.status for one in results] == [status] * 2
        assert producer.is_broken == (status is UNAVAILABLE)
        assert text.split(maxsplit=1)[1] in results[0].reason

    def test_is_read_inside_of_a_pipelines_error(self):
        error = redis.ResponseError("Command # 1 (LLEN wrong) of pipeline caused error: NOREPLICAS Not enough good replicas.")

        assert redis_code(error) == "NOREPLICAS"


class TestConnectionThatRabbitMQCloses:
    @pytest.mark.parametrize(("code", "text", "is_possible_poison"), CLOSED, ids=[str(code) for code, *_ in CLOSED])
    def test_is_an_outage_or_the_answer_to_a_task(self, code: int, text: str, is_possible_poison: bool):
        error = error_for_code(code, text, (40, 10), amqp.exceptions.ConnectionError)
        producer = ConfirmingProducer.__new__(ConfirmingProducer)
        producer.refusal = None

        result = producer._break(error, parcels(), queue="odd")

        assert result.status is UNAVAILABLE
        assert (producer.refusal is not None) == is_possible_poison
        assert text in result.reason

    def test_is_told_in_the_servers_words_where_the_client_fails_over_its_closed_socket(self):
        said = amqp.InvalidCommand("COMMAND_INVALID - unknown exchange type 'x'", (40, 10), reply_code=503)

        found = closed_by_server(_masked(said))

        assert found is said


class TestLogin:
    @pytest.mark.parametrize(("error", "status"), LOGINS, ids=[str(number) for number in range(len(LOGINS))])
    def test_that_fails_is_an_outage_or_a_refusal(self, error: Exception, status: SendStatus):
        assert not_connected(error).status is status


def _masked(first: Exception) -> Exception:
    try:
        try:
            raise first
        finally:
            raise OSError(9, "Bad file descriptor")
    except OSError as error:
        return error


def _raising(error: Exception) -> Any:
    def fail(*_: object) -> None:
        raise error

    return fail
