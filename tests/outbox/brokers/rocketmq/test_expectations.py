"""What brokers must be set to. Needs no server; that one is asked shows test_check.py."""

from __future__ import annotations

import time
from typing import Any

import pytest

from outbox.brokers.options import read_options
from outbox.brokers.rocketmq import expectations
from outbox.brokers.rocketmq.expectations import problems_of_brokers, problems_of_clock, problems_of_settings
from outbox.brokers.rocketmq.options import RocketMQOptions

OPTIONS = read_options(RocketMQOptions, {"ENDPOINTS": "proxy:8081", "BROKER_ADDRESSES": ["broker:10911"]})

RIGHT = {
    "transactionTimeOut": "6000",
    "transactionCheckMax": "15",
    "transactionCheckInterval": "30000",
    "transactionOpBatchInterval": "3600000",
    "transactionOpMsgMaxSize": "1",
    "flushDiskType": "SYNC_FLUSH",
    "brokerRole": "ASYNC_MASTER",
}


class TestSettings:
    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"flushDiskType": "ASYNC_FLUSH", "brokerRole": "SYNC_MASTER"},
            {"transactionOpBatchInterval": "1000", "transactionOpMsgMaxSize": "4096"},
        ],
        ids=str,
    )
    def test_are_right(self, settings: dict[str, str]):
        assert list(problems_of_settings("broker:10911", OPTIONS, RIGHT | settings)) == []

    @pytest.mark.parametrize(
        ("settings", "words", "is_error"),
        [
            ({"transactionTimeOut": "5999"}, "COMMIT_WINDOW", True),
            ({"transactionCheckMax": "20"}, "CHECK_HORIZON", True),
            ({"transactionOpBatchInterval": "3000", "transactionOpMsgMaxSize": "4096"}, "transactionOpBatchInterval", False),
            ({"transactionOpMsgMaxSize": "4096"}, "only each 1:00:00", False),
            ({"flushDiskType": "ASYNC_FLUSH"}, "power", False),
        ],
    )
    def test_are_wrong(self, settings: dict[str, str], words: str, is_error: bool):
        [problem] = problems_of_settings("broker:10911", OPTIONS, RIGHT | settings)

        assert "broker:10911" in problem.text
        assert words in problem.text
        assert problem.is_error is is_error


class TestClock:
    @pytest.mark.parametrize("ahead", [-2.9, 0, 2.9])
    def test_may_differ_a_little(self, ahead: float):
        assert list(problems_of_clock("broker:10911", ahead)) == []

    @pytest.mark.parametrize("ahead", [-10, 10])
    def test_must_not_be_ten_seconds_off(self, ahead: float):
        [problem] = problems_of_clock("broker:10911", ahead)

        assert "differ by 10 s" in problem.text

    @pytest.mark.parametrize("off", [0, -10, 10])
    def test_is_read_from_what_a_broker_says_of_its_start(self, monkeypatch: pytest.MonkeyPatch, off: float):
        now = time.time()
        started_at = now - (86400 + 2 * 3600 + 3 * 60 + 4)
        says: dict[int, bytes] = {
            expectations.BROKER_CONFIG: "\n".join(f"{name}={value}" for name, value in RIGHT.items()).encode(),
            expectations.BROKER_RUNTIME: (
                f'{{"table": {{"bootTimestamp": "{started_at * 1000:.0f}",'
                ' "runtime": "[ 1 days, 2 hours, 3 minutes, 4 seconds ]"}}'
            ).encode(),
        }
        monkeypatch.setattr(expectations, "call", lambda address, code: says[code])

        found = [problem.text for problem in problems_of_brokers(OPTIONS, now=lambda: now + off)]

        assert len(found) == (1 if off else 0)


class TestBroker:
    def test_that_cannot_be_asked_is_a_problem_since_rule_r_asks_it(self, monkeypatch: pytest.MonkeyPatch):
        def refuse(*_: Any) -> bytes:
            raise ConnectionRefusedError("refused")

        monkeypatch.setattr(expectations, "call", refuse)

        [problem] = problems_of_brokers(OPTIONS)

        assert "cannot be asked: refused" in problem.text
        assert "looked up there" in problem.hint
