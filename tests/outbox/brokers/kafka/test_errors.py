"""What the errors of Kafka mean, without a server."""

import pytest
from confluent_kafka import KafkaError, KafkaException

from outbox.brokers.base import SendStatus
from outbox.brokers.kafka.errors import MISCONFIGURED, OF_TOPIC, REFUSED, UNAVAILABLE, call_error, send_result
from outbox.errors import BrokerMisconfigured, BrokerUnavailable


class TestTables:
    def test_have_each_error_once(self):
        tables = [set(REFUSED), set(MISCONFIGURED), set(UNAVAILABLE)]

        assert len(set().union(*tables)) == sum(map(len, tables))
        assert set(MISCONFIGURED) >= OF_TOPIC

    def test_have_what_a_server_answers_to_a_producer(self):
        """Source: kafka-clients, ProduceResponse, AddPartitionsToTxnResponse, InitProducerIdResponse; EndTxnResponse."""
        lost = {  # of a producer whose transaction is over, or whose records may be stored: no table says what became of them
            "UNKNOWN",
            "INVALID_PRODUCER_EPOCH",
            "PRODUCER_FENCED",
            "TRANSACTION_COORDINATOR_FENCED",
            "INVALID_TXN_STATE",
            "INVALID_PRODUCER_ID_MAPPING",
            "UNKNOWN_PRODUCER_ID",
            "OUT_OF_ORDER_SEQUENCE_NUMBER",
            "DUPLICATE_SEQUENCE_NUMBER",
            "TRANSACTION_ABORTABLE",
        }
        answers = {
            "INVALID_MSG", "UNKNOWN_TOPIC_OR_PART", "NOT_LEADER_FOR_PARTITION", "MSG_SIZE_TOO_LARGE", "TOPIC_EXCEPTION",
            "RECORD_LIST_TOO_LARGE", "NOT_ENOUGH_REPLICAS", "NOT_ENOUGH_REPLICAS_AFTER_APPEND", "TOPIC_AUTHORIZATION_FAILED",
            "UNSUPPORTED_FOR_MESSAGE_FORMAT", "CLUSTER_AUTHORIZATION_FAILED", "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
            "INVALID_RECORD", "INVALID_TIMESTAMP", "KAFKA_STORAGE_ERROR", "REQUEST_TIMED_OUT", "UNSUPPORTED_COMPRESSION_TYPE",
            "COORDINATOR_LOAD_IN_PROGRESS", "COORDINATOR_NOT_AVAILABLE", "NOT_COORDINATOR", "CONCURRENT_TRANSACTIONS",
            "INVALID_TRANSACTION_TIMEOUT", "NETWORK_EXCEPTION", "LEADER_NOT_AVAILABLE", "THROTTLING_QUOTA_EXCEEDED",
        }  # fmt: skip
        told = {*REFUSED, *MISCONFIGURED, *UNAVAILABLE}

        assert [name for name in sorted(answers) if getattr(KafkaError, name) not in told] == []
        assert [name for name in sorted(lost) if getattr(KafkaError, name) in told] == []


class TestResult:
    @pytest.mark.parametrize(
        ("code", "status"),
        [
            (KafkaError.MSG_SIZE_TOO_LARGE, SendStatus.REFUSED),
            (KafkaError.UNKNOWN_TOPIC_OR_PART, SendStatus.MISCONFIGURED),
            (KafkaError.NOT_ENOUGH_REPLICAS, SendStatus.UNAVAILABLE),
            (KafkaError.INVALID_TIMESTAMP, SendStatus.UNAVAILABLE),
            (KafkaError._INVALID_DIFFERENT_RECORD, SendStatus.UNAVAILABLE),
            (KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, SendStatus.UNSURE),
        ],
    )
    def test_follows_from_the_error(self, code, status):
        assert send_result(KafkaError(code), "orders").status is status

    def test_of_a_time_out_names_the_cause(self):
        found = send_result(KafkaError(KafkaError._MSG_TIMED_OUT), "orders", KafkaError(KafkaError._AUTHENTICATION))

        assert found.status is SendStatus.UNAVAILABLE
        assert 'user and password in OPTIONS["CLIENT"]' in found.reason


class TestCall:
    def test_that_timed_out_names_the_cause(self):
        raised = KafkaException(KafkaError(KafkaError._TIMED_OUT))

        found = call_error(raised, "list its topics", KafkaError(KafkaError._AUTHENTICATION))

        assert isinstance(found, BrokerMisconfigured)
        assert "_AUTHENTICATION" in str(found)

    def test_that_was_refused_is_not_explained_by_a_connection(self):
        raised = KafkaException(KafkaError(KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED))

        found = call_error(raised, "open a lane", KafkaError(KafkaError._TRANSPORT))

        assert isinstance(found, BrokerMisconfigured)
        assert "TRANSACTIONAL_ID_AUTHORIZATION_FAILED" in str(found)

    def test_without_an_answer_is_an_outage(self):
        found = call_error(TimeoutError(), "list its topics")

        assert type(found) is BrokerUnavailable
