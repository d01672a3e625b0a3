"""
Settings of the benchmarks: topics of their own, on a broker that keeps nothing, on the embedded one, and on a RocketMQ,
RabbitMQ or Kafka where one was started.
"""

import json
import os
from typing import Any

from project.settings import *  # noqa: F403  (database, Celery)

DEBUG = False  # with it, Django formats each statement for its log, and every ratio is of that
INSTALLED_APPS = ["outbox", "outbox.embedded", "outbox.pipeline", "benchmarks"]
ROOT_URLCONF = None  # no pages
MIDDLEWARE: list[str] = []
TEMPLATES: list[Any] = []
SILENCED_SYSTEM_CHECKS = ["outbox.E027"]  # nobody answers the null broker's questions, and it asks none

OUTBOX: dict[str, Any] = {
    "BROKERS": {
        "default": {"BACKEND": "outbox.embedded.EmbeddedBroker", "OPTIONS": {"DATABASE": "default"}},
        "null": {"BACKEND": "benchmarks.null_broker.NullBroker"},
        "clocked": {"BACKEND": "benchmarks.clocked_broker.ClockedBroker"},
    },
    "TOPICS": {
        "bench-two-phase": {"TYPE": "transaction"},
        "bench-clocked": {"TYPE": "transaction"},
        "bench-clocked-one-phase": {"TYPE": "normal"},
        "bench-clocked-at-broker": {"TYPE": "normal", "BROKER": "clocked"},
        "bench-consumed": {"TYPE": "normal"},
        "bench-consumed-two-phase": {"TYPE": "transaction"},
        "bench-null-one-phase": {"TYPE": "normal", "BROKER": "null"},
        "bench-null-two-phase": {"TYPE": "transaction", "BROKER": "null"},
        "bench-rocketmq": {"TYPE": "transaction", "BROKER": "null"},  # on RocketMQ where one was started; a message type names it
        "bench-rabbitmq": {"TYPE": "normal", "BROKER": "null"},  # likewise
        "bench-kafka": {"TYPE": "normal", "BROKER": "null"},  # likewise
        "bench-null-away": {"TYPE": "normal", "BROKER": "null"},
        **{f"bench-null-other-{n}": {"TYPE": "normal", "BROKER": "null"} for n in range(3)},
        "bench-null-paused": {"TYPE": "normal", "BROKER": "null"},
        **{f"bench-skewed-{n}": {"TYPE": "normal", "BROKER": "null"} for n in range(200)},
    },
    "CELERY_WAKEUP": "BENCH_CELERY_WAKEUP" in os.environ,
}


def with_rocketmq(options: dict[str, Any]) -> dict[str, Any]:
    """Return OUTBOX with a RocketMQ, and topics on it."""
    broker = {"BACKEND": "outbox.brokers.rocketmq.RocketMQBroker", "OPTIONS": options}
    topics = {name: {"TYPE": "transaction", "BROKER": "rocketmq"} for name in ("bench-rocketmq", "bench-rocketmq-bulk")}
    return {**OUTBOX, "BROKERS": {**OUTBOX["BROKERS"], "rocketmq": broker}, "TOPICS": {**OUTBOX["TOPICS"], **topics}}


def with_rabbitmq(address: str) -> dict[str, Any]:
    """Return OUTBOX with a RabbitMQ, a topic on it, and Celery's tasks."""
    rabbitmq = {
        "BACKEND": "outbox.brokers.rabbitmq.RabbitMQBroker",
        "OPTIONS": {"NODES": [address], "GROUPS": {"bench-rabbitmq": ["bench-rabbitmq"]}},
    }
    tasks = {"BACKEND": "outbox.celery.CeleryBroker", "OPTIONS": {"APP": "benchmarks.celery_worker.app"}}
    topics = {"bench-rabbitmq": {"TYPE": "normal", "BROKER": "rabbitmq"}}
    brokers = {**OUTBOX["BROKERS"], "rabbitmq": rabbitmq, "celery": tasks}
    return {**OUTBOX, "BROKERS": brokers, "TOPICS": {**OUTBOX["TOPICS"], **topics}}


def with_kafka(address: str) -> dict[str, Any]:
    """Return OUTBOX with a Kafka, and topics on it, one of them without transactions."""
    backend = "outbox.brokers.kafka.KafkaBroker"
    brokers = {
        "kafka": {"BACKEND": backend, "OPTIONS": {"SERVERS": [address]}},
        "kafka-plain": {"BACKEND": backend, "OPTIONS": {"SERVERS": [address], "TRANSACTIONS": False}},
    }
    topics = {f"bench-{alias}": {"TYPE": "normal", "BROKER": alias} for alias in brokers}
    return {**OUTBOX, "BROKERS": {**OUTBOX["BROKERS"], **brokers}, "TOPICS": {**OUTBOX["TOPICS"], **topics}}


if "BENCH_RABBITMQ" in os.environ:
    OUTBOX = with_rabbitmq(os.environ["BENCH_RABBITMQ"])
if "BENCH_KAFKA" in os.environ:
    OUTBOX = with_kafka(os.environ["BENCH_KAFKA"])
if "BENCH_ROCKETMQ" in os.environ:
    OUTBOX = with_rocketmq(json.loads(os.environ["BENCH_ROCKETMQ"]))
