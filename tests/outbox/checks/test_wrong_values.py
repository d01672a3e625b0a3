"""Values that the run would refuse are refused by `check`, with the name of the setting: a table of all settings."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from tests.outbox.checks.conftest import BROKERS

Outbox = dict[str, Any]

ZERO = timedelta()
WRONG_DURATIONS = [timedelta(seconds=-1), timedelta(days=40_000), timedelta.max, 5, "soon", True]
WRONG_COUNTS = [0, -1, 32_768, 2**31, 2**63, 1.5, "4", True, None]
SECRET = f"whsec_{'A' * 44}"


def parts(**topic: Any) -> Outbox:
    return {"TOPICS": {"parts": topic}}


def served_by(backend: str, **needed: Any) -> Callable[..., Outbox]:
    def outbox(**options: Any) -> Outbox:
        return {"BROKERS": {"default": {"BACKEND": backend, "OPTIONS": needed | options}}, **parts()}

    return outbox


def celery(**options: Any) -> Outbox:
    return {"BROKERS": {**BROKERS, "celery": {"BACKEND": "outbox.celery.CeleryBroker", "OPTIONS": options}}}


embedded = served_by("outbox.embedded.EmbeddedBroker")
memory = served_by("outbox.brokers.memory.MemoryBroker")
rabbitmq = served_by("outbox.brokers.rabbitmq.RabbitMQBroker", NODES=["127.0.0.1"])
rocketmq = served_by("outbox.brokers.rocketmq.RocketMQBroker", ENDPOINTS="127.0.0.1:8081", NAME_SERVERS=["127.0.0.1:9876"])


def section(name: str) -> Callable[..., Outbox]:
    return lambda **values: {name: values}


def whole(**values: Any) -> Outbox:
    return values


relay, receiving, check_back, pipeline = map(section, ("RELAY", "CONSUMER", "CHECK_BACK", "PIPELINE"))


def archive(**values: Any) -> Outbox:
    return pipeline(ARCHIVE={"PATH": "/srv/lake", **values})


def audit(**values: Any) -> Outbox:
    return pipeline(AUDIT={"orders": {"MODEL": "shop.Order", "EXPECTS": "OrderPlaced", **values}})


DURATIONS: list[tuple[Callable[..., Outbox], list[str]]] = [
    (whole, ["RETENTION", "IDEMPOTENCY_RETENTION"]),
    (parts, ["RETENTION"]),
    (relay, ["LEASE", "SWEEP_AGE", "TASK_TIME"]),
    (receiving, ["INVISIBLE", "WAIT", "SETTLE", "TASK_TIME"]),
    (check_back, ["LOCK_TIMEOUT"]),
    (pipeline, ["AUDIT_RETENTION"]),
    (archive, ["AFTER"]),
    (embedded, ["CHECK_AFTER", "CHECK_INTERVAL", "STATEMENT_TIMEOUT"]),
    (memory, ["CHECK_AFTER", "CHECK_INTERVAL", "COMMIT_WINDOW"]),
    (rabbitmq, ["HEARTBEAT", "REQUEST_TIMEOUT", "CONSUMER_TIMEOUT"]),
    (rocketmq, ["REQUEST_TIMEOUT", "COMMIT_WINDOW", "CHECK_HORIZON"]),
    (celery, ["TIMEOUT"]),
]

OTHERS: list[tuple[Callable[..., Outbox], str, list[Any]]] = [
    (parts, "QUEUES", WRONG_COUNTS),
    (parts, "TYPE", ["Fifo", "", 5]),
    (parts, "BROKER", ["", "nowhere", 5, None]),
    (whole, "TOPICS", [[], {"": {}}, {"a b": {}}, {"x" * 128: {}}, {"parts": None}, None]),
    (whole, "BROKERS", [[], {"default": None}, {"default": {"BACKEND": ""}}, {"default": {"OPTIONS": []}}, None]),
    (whole, "DIRECT_DATABASES", [[], {"nowhere": "default"}, {"default": "default"}, {"default": 5}]),
    (whole, "CELERY_QUEUE", ["", "x" * 256, 5, None]),
    (whole, "CELERY_WAKEUP", ["", 1, None]),
    (whole, "PIPELINE", [[], "lake", None]),
    (relay, "BATCH_SIZE", [*WRONG_COUNTS, 2_001]),
    (relay, "LANES", WRONG_COUNTS),
    (receiving, "BATCH_SIZE", WRONG_COUNTS),
    (check_back, "THROTTLE", ["", "0/s", "-1/s", "600", "1/0s", "1/s ", "1.5/s", 5, None]),
    (check_back, "SECRETS", [SECRET, ["x"], ["whsec_AA"], [5], None]),
    (
        lambda **values: check_back(SECRETS=[SECRET], **values),
        "URL",
        ["check-back", "ftp://shop/", "http://", "http:///path", "http://a b/", "http://shop:99999/", "http://shop:0/", 5],
    ),
    (pipeline, "AUDIT", [[], {"orders": {}}, {"orders": None}]),
    (pipeline, "ARCHIVE", ["/srv/lake", {}]),
    (archive, "PATH", ["", "lake", "s3://lake", "~/lake", 5, None]),
    (audit, "MODEL", ["", "Order", "shop.Odrer", "outbox.Lane", 5]),
    (audit, "EXPECTS", ["", "OrderPlaecd", 5, None]),
    (audit, "AT", ["placed", "invoice", "customer", "lines", 5]),
    (audit, "WHERE", [5, None]),
    (embedded, "CHECK_LIMIT", [*WRONG_COUNTS, 1_001]),
    (embedded, "DATABASE", ["", "nowhere", 5]),
    (embedded, "START", ["", "end", 5]),
    (rabbitmq, "NODES", [[], "a:5672", [""], ["a:0"], ["a:65536"], ["a b"], ["amqp://a"], [5]]),
    (rabbitmq, "GROUPS", [{"nowhere": ["a"]}, {"parts": "a"}, {"parts": [""]}, {"parts": ["x" * 128]}, {"parts": [5]}]),
    (rabbitmq, "HEARTBEAT", [timedelta(seconds=65_536)]),
    (rabbitmq, "MAX_LENGTH", [0, -1, 2**63, "4"]),
    (rabbitmq, "MANAGEMENT_URL", ["rabbit", "ftp://rabbit", "http://", 5]),
    (rabbitmq, "VIRTUAL_HOST", ["", 5]),
    (rabbitmq, "TLS_CA_FILE", ["/nowhere.pem", 5]),
    (rocketmq, "ENDPOINTS", ["", "a", "a:0", "a:65536", "a:1;", 5]),
    (rocketmq, "NAME_SERVERS", ["a:1", [""], ["a:65536"], [5]]),
    (rocketmq, "BROKER_ADDRESSES", [{"b": "a"}, {"b": 5}]),
    (rocketmq, "IN_FLIGHT", [0, 1_025, "4"]),
    (rocketmq, "COMPRESS_ABOVE_BYTES", [-1, "4"]),
    (rocketmq, "ACCESS_KEY", ["one of two", 5]),
    (rocketmq, "TLS_CA_FILE", ["/nowhere.pem", 5]),
    (celery, "APP", ["nowhere", "datetime.datetime", 5]),
]

MAY_BE_ZERO = {"SWEEP_AGE", "WAIT"}


def rows() -> Iterator[Any]:
    for make, names in DURATIONS:
        for name in names:
            yield row(make, name, [*WRONG_DURATIONS, *([] if name in MAY_BE_ZERO else [ZERO])])
    for make, name, values in OTHERS:
        yield row(make, name, values)


def row(make: Callable[..., Outbox], name: str, values: list[Any]) -> Any:
    """Make a row of the table; that of an option of RocketMQ needs its client."""
    return pytest.param(make, name, values, id=name, marks=[pytest.mark.rocketmq] if make is rocketmq else [])


class TestWrongValues:
    @pytest.mark.parametrize(("make", "name", "values"), list(rows()))
    def test_are_errors_that_name_the_setting(self, settings, found, make, name, values):
        accepted = {}

        for value in values:
            settings.OUTBOX = {"BROKERS": BROKERS, **make(**{name: value})}
            errors = [f"{problem.obj}: {problem.msg}" for problem in found() if problem.is_serious()]
            if not any(name in text for text in errors):
                accepted[repr(value)] = errors

        assert accepted == {}
