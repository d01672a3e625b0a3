"""What brokers must be set to, held against what they are: asked of their own ports, for `Broker.check()`."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta

from outbox.brokers.base import Problem
from outbox.brokers.rocketmq.options import RocketMQOptions, address
from outbox.brokers.rocketmq.remoting import RemotingError, call

BROKER_CONFIG, BROKER_RUNTIME = 26, 28

WINDOWS_IN_TIMEOUT = 3  # a commit, the time it needs to arrive, and clocks that differ
MOST_BATCH_INTERVAL = timedelta(seconds=1)
MOST_CLOCK_DIFFERENCE = timedelta(seconds=3)  # the broker tells its time by whole seconds

RUNTIME = re.compile(r"(\d+) days?, (\d+) hours?, (\d+) minutes?, (\d+) seconds?")


def problems_of_brokers(options: RocketMQOptions, now: Callable[[], float] = time.time) -> Iterator[Problem]:
    """
    Say what is wrong with the settings and the clock of each broker that OPTIONS name.

    Args:
        now: gives seconds since 1970.
    """
    for text in options.broker_addresses:
        try:
            settings = _settings(call(address(text), BROKER_CONFIG).decode())
            asked_at = now()
            clock = _clock(json.loads(call(address(text), BROKER_RUNTIME))["table"])
        except (OSError, RemotingError) as error:
            hint = "Correct BROKER_ADDRESSES, or open the port: messages are looked up there before they are sent again."
            yield Problem(f"Broker {text} cannot be asked: {error}.", hint)
        else:
            yield from problems_of_settings(text, options, settings)
            yield from problems_of_clock(text, clock - asked_at)


def problems_of_settings(broker: str, options: RocketMQOptions, settings: Mapping[str, str]) -> Iterator[Problem]:
    """Say which settings of a broker do not fit OPTIONS, or cost messages."""
    timeout, interval, batch = (
        timedelta(milliseconds=int(settings[name]))
        for name in ("transactionTimeOut", "transactionCheckInterval", "transactionOpBatchInterval")
    )
    horizon = timeout + interval * int(settings["transactionCheckMax"])
    if timeout < options.commit_window * WINDOWS_IN_TIMEOUT:
        yield Problem(
            f"Broker {broker} asks about half messages after {timeout} (transactionTimeOut), and COMMIT_WINDOW is "
            f"{options.commit_window}: commits meet questions, and make copies.",
            f"Set transactionTimeOut to {WINDOWS_IN_TIMEOUT} x COMMIT_WINDOW or more.",
        )
    if options.check_horizon <= horizon:
        yield Problem(
            f"Broker {broker} asks for {horizon} (transactionTimeOut + transactionCheckMax x transactionCheckInterval), and "
            f"CHECK_HORIZON is {options.check_horizon}: a message may be sent again that is still asked about.",
            "Set CHECK_HORIZON longer.",
        )
    if batch > MOST_BATCH_INTERVAL and int(settings["transactionOpMsgMaxSize"]) > 1:
        yield Problem(
            f"Broker {broker} notes ends of half messages only each {batch} (transactionOpBatchInterval): it asks about, and "
            "copies, what has been committed.",
            "Set transactionOpMsgMaxSize=1 and transactionOpBatchInterval=3600000: then it notes them at once.",
            is_error=False,
        )
    if settings["flushDiskType"] == "ASYNC_FLUSH" and settings["brokerRole"] == "ASYNC_MASTER":
        yield Problem(
            f"Broker {broker} accepts messages before they are on a disk or at a replica (flushDiskType=ASYNC_FLUSH, "
            "brokerRole=ASYNC_MASTER): a machine that loses its power loses them.",
            "Set flushDiskType=SYNC_FLUSH or brokerRole=SYNC_MASTER where no message may be lost.",
            is_error=False,
        )


def problems_of_clock(broker: str, ahead_seconds: float) -> Iterator[Problem]:
    """Say that a broker's clock and ours disagree."""
    if abs(ahead_seconds) > MOST_CLOCK_DIFFERENCE.total_seconds():
        yield Problem(
            f"The clock of broker {broker} and this machine's differ by {abs(ahead_seconds):.0f} s: the broker asks about half "
            "messages too early, which makes copies.",
            "Have both follow NTP.",
        )


def _settings(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def _clock(runtime: Mapping[str, str]) -> float:
    """Tell the time of a broker by when it started and how long it runs."""
    match = RUNTIME.search(runtime["runtime"])
    assert match is not None, f"a broker says that it runs {runtime['runtime']}"
    days, hours, minutes, seconds = map(int, match.groups())
    running = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    return int(runtime["bootTimestamp"]) / 1000 + running.total_seconds()
