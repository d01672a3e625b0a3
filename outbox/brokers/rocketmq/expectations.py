"""What brokers must be set to, held against what they are: asked of their own ports, for `Broker.check()`."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta

from outbox.brokers.base import Problem
from outbox.brokers.rocketmq.client import Client
from outbox.brokers.rocketmq.consumer_groups import problems_of_groups
from outbox.brokers.rocketmq.options import RocketMQOptions
from outbox.brokers.rocketmq.places import HALVES
from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.frames import Answer, RemotingError, Request
from outbox.brokers.rocketmq.settlement import MOST_HIDDEN
from outbox.message import TopicSpec, TopicType

MOST_BATCH_INTERVAL = timedelta(seconds=1)
CLEAN_UP_INTERVAL = timedelta(days=1)  # deleteWhen: once a day, at that hour
MOST_CLOCK_DIFFERENCE = timedelta(seconds=3)  # the broker tells its time by whole seconds

NOWHERE = 2**62  # a place that no log has

RUNTIME = re.compile(r"(\d+) days?, (\d+) hours?, (\d+) minutes?, (\d+) seconds?")

NO_PORTS = (
    "half messages are sent and ended at the brokers' own ports, whose answers prove that an end took effect, and OPTIONS name "
    "neither NAME_SERVERS nor BROKER_ADDRESSES."
)
NO_PORTS_HINT = (
    'Give OPTIONS["NAME_SERVERS"], like ["namesrv:9876"]. Where only a proxy can be reached, UNCONFIRMED_ENDS=True takes its '
    "word for it, and messages can be lost."
)
UNCONFIRMED = (
    "UNCONFIRMED_ENDS is on: a proxy's OK to a COMMIT does not say that the broker has it. A message counts as sent and is lost "
    "where its broker dies within a moment of that and no check-back is answered until the broker gives up asking."
)


def problems_of_topics(options: RocketMQOptions, topics: Sequence[TopicSpec]) -> list[Problem]:
    """Return what OPTIONS lack for topics of type transaction, or cost them."""
    two_phase = ", ".join(sorted(topic.name for topic in topics if topic.type is TopicType.TRANSACTION))
    if not two_phase:
        return []
    if options.unconfirmed_ends:
        return [Problem(f"Topics of type transaction ({two_phase}): {UNCONFIRMED}", NO_PORTS_HINT, is_error=False)]
    if not (options.name_servers or options.broker_addresses):
        return [Problem(f"Topics of type transaction ({two_phase}): {NO_PORTS}", NO_PORTS_HINT)]
    return []


async def problems_of_brokers(client: Client, topics: Sequence[TopicSpec], now: Callable[[], float] = time.time) -> list[Problem]:
    """
    Return what is wrong with the settings, the clock and our rights of each broker of our topics.

    Args:
        now: returns seconds since 1970.
    """
    if client.options.unconfirmed_ends or not client.ports.are_known:
        return []
    found: list[Problem] = []
    served: dict[str, list[TopicSpec]] = {}  # host:port -> the topics that are there
    for topic in topics:
        try:
            addresses = await client.ports.addresses(topic.name)
        except ConnectionError as error:
            return [Problem(str(error), "Correct NAME_SERVERS, or open the port.")]
        for address in addresses.values():
            served.setdefault(address, []).append(topic)
    for address, there in served.items():
        found += await _problems_of(client, address, there, now)
    return found


async def _problems_of(client: Client, address: str, topics: Sequence[TopicSpec], now: Callable[[], float]) -> list[Problem]:
    try:
        config = (await client.ports.ask(address, Request(requests.GET_BROKER_CONFIG))).checked()
        settings = _settings(config.body.decode())
        asked_at = now()
        runtime = (await client.ports.ask(address, Request(requests.GET_RUNTIME_INFO))).checked()
        clock = _clock(json.loads(runtime.body)["table"])
        found = [*problems_of_settings(address, client.options, settings), *problems_of_clock(address, clock - asked_at)]
        found += problems_of_retention(address, settings, topics)
        two_phase = [topic.name for topic in topics if topic.type is TopicType.TRANSACTION]
        for request, need in _needed(two_phase[-1]) if two_phase else ():
            found += _problem_of_a_right(address, need, await client.ports.ask(address, request))
        found += await problems_of_groups(client, address, topics)
    except (ConnectionError, RemotingError) as error:
        hint = "Correct NAME_SERVERS or BROKER_ADDRESSES, open the port, or grant ACCESS_KEY its rights (ACL 2.0)."
        return [Problem(f"Broker {address} cannot be asked: {error}.", hint)]
    return found


def problems_of_settings(broker: str, options: RocketMQOptions, settings: Mapping[str, str]) -> Iterator[Problem]:
    """Return which settings of a broker do not fit OPTIONS, or cost messages."""
    timeout, interval, batch = (
        timedelta(milliseconds=int(settings[name]))
        for name in ("transactionTimeOut", "transactionCheckInterval", "transactionOpBatchInterval")
    )
    horizon = timeout + interval * int(settings["transactionCheckMax"])
    if timeout < options.commit_window:
        yield Problem(
            f"Broker {broker} asks about half messages after {timeout} (transactionTimeOut), and COMMIT_WINDOW is "
            f"{options.commit_window}: rounds of check-backs pass before they can be answered.",
            "Set transactionTimeOut to COMMIT_WINDOW or more.",
            is_error=False,
        )
    if options.check_horizon <= horizon:
        yield Problem(
            f"Broker {broker} asks for {horizon} (transactionTimeOut + transactionCheckMax x transactionCheckInterval), and "
            f"CHECK_HORIZON is {options.check_horizon}: rows that the answers stand on may be pruned too early.",
            "Set CHECK_HORIZON longer.",
        )
    if batch > MOST_BATCH_INTERVAL and int(settings["transactionOpMsgMaxSize"]) > 1:
        yield Problem(
            f"Broker {broker} notes ends of half messages only each {batch} (transactionOpBatchInterval): it asks about what has "
            "been committed.",
            "Set transactionOpMsgMaxSize=1 and transactionOpBatchInterval=3600000: then it notes them at once.",
            is_error=False,
        )
    yield from _problems_of_the_store(broker, settings)


def _problems_of_the_store(broker: str, settings: Mapping[str, str]) -> Iterator[Problem]:
    if settings.get("rejectTransactionMessage") == "true":
        yield Problem(
            f"Broker {broker} takes no half messages (rejectTransactionMessage=true).", "Set rejectTransactionMessage=false."
        )
    if settings.get("transientStorePoolEnable") == "true":
        yield Problem(
            f"Broker {broker} answers before a message is in the page cache (transientStorePoolEnable=true): a broker that is "
            "killed loses messages it has confirmed.",
            "Set transientStorePoolEnable=false.",
        )
    if settings.get("messageIndexEnable") == "false":
        yield Problem(
            f"Broker {broker} has no index of messages (messageIndexEnable=false): what has no answer can be looked up only by "
            "reading its queues, and check-backs make copies.",
            "Set messageIndexEnable=true.",
        )
    elif settings.get("messageIndexSafe") == "false":
        yield Problem(
            f"Broker {broker} forgets part of its index of messages when it is killed (messageIndexSafe=false): what has no "
            "answer is then looked up by reading its queues, and check-backs may make copies.",
            "Set messageIndexSafe=true.",
            is_error=False,
        )
    if settings.get("flushDiskType") == "ASYNC_FLUSH" and settings.get("brokerRole") == "ASYNC_MASTER":
        yield Problem(
            f"Broker {broker} accepts messages before they are on a disk or at a replica (flushDiskType=ASYNC_FLUSH, "
            "brokerRole=ASYNC_MASTER): a machine that loses its power loses them.",
            "Set flushDiskType=SYNC_FLUSH or brokerRole=SYNC_MASTER where no message may be lost.",
            is_error=False,
        )


def problems_of_retention(broker: str, settings: Mapping[str, str], topics: Sequence[TopicSpec]) -> Iterator[Problem]:
    """Report that a broker may hand out messages that consumers no longer remember."""
    hours = int(settings["fileReservedTime"])
    needed = timedelta(hours=hours) + CLEAN_UP_INTERVAL + MOST_HIDDEN
    if topics and (remembered := min(topic.remembered for topic in topics)) < needed:
        yield Problem(
            f"Broker {broker} keeps messages for {hours} hours (fileReservedTime) and up to a day more, and inbox rows are kept "
            f"for {remembered}: a message whose acknowledgement was lost may come, and be handled, once more behind that.",
            f'Set OUTBOX["RETENTION"] to {needed} or more, or fileReservedTime lower.',
            is_error=False,
        )


def _needed(topic: str) -> list[tuple[Request, str]]:
    """Return requests that change nothing, each with the right that it needs."""
    return [
        (requests.end(topic, "", NOWHERE, NOWHERE, requests.ROLLBACK_TYPE), f"Pub on Topic:{topic}, to end half messages"),
        (requests.query(topic, "-"), f"Sub on Topic:{topic}, to look messages up"),
        (requests.query(HALVES, "-"), f"Sub on Topic:{HALVES}, to look half messages up"),
        (requests.pull(HALVES, 0, 0), f"Sub on Topic:{HALVES} and Group:{requests.READER}, to read what a look-up does not find"),
    ]


def _problem_of_a_right(broker: str, need: str, answer: Answer) -> Iterator[Problem]:
    if answer.code == requests.NO_PERMISSION:
        yield Problem(
            f"Broker {broker} refuses ACCESS_KEY a right: {need}. It says: {answer.text}",
            "Grant it (ACL 2.0). Without it nothing is lost; what gets no answer is not settled.",
        )


def problems_of_clock(broker: str, ahead_seconds: float) -> Iterator[Problem]:
    """Report that a broker's clock and ours disagree."""
    if abs(ahead_seconds) > MOST_CLOCK_DIFFERENCE.total_seconds():
        yield Problem(
            f"The clock of broker {broker} and this machine's differ by {abs(ahead_seconds):.0f} s: the broker asks about half "
            "messages too early, which makes copies.",
            "Have both follow NTP.",
        )


def _settings(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def _clock(runtime: Mapping[str, str]) -> float:
    """Return the time of a broker by when it started and how long it runs."""
    match = RUNTIME.search(runtime["runtime"])
    assert match is not None, f"a broker says that it runs {runtime['runtime']}"
    days, hours, minutes, seconds = map(int, match.groups())
    running = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    return int(runtime["bootTimestamp"]) / 1000 + running.total_seconds()
