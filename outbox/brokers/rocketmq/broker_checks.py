"""Checks of the brokers' settings, clocks and permissions, for `Broker.check()`; they use the remoting protocol."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

from outbox.brokers.rocketmq.client import RocketMQClient
from outbox.brokers.rocketmq.group_checks import problems_of_groups
from outbox.brokers.rocketmq.options import RocketMQOptions
from outbox.brokers.rocketmq.places import HALVES
from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.frames import RemotingAnswer, RemotingError, Request
from outbox.brokers.rocketmq.settlement import MAX_INVISIBLE
from outbox.brokers.validation import problem_of_retention
from outbox.errors import BrokerUnavailable
from outbox.findings import Finding, misconfigured, risky_option, unavailable, weak, wrong_option
from outbox.message import TopicSpec, TopicType

MAX_BATCH_INTERVAL = timedelta(seconds=1)
CLEAN_UP_INTERVAL = timedelta(days=1)  # deleteWhen is an hour of the day
MAX_CLOCK_DIFFERENCE = timedelta(seconds=3)  # the broker reports its time in whole seconds

NOWHERE = 2**62  # an offset beyond the end of any log, so that a request with it has no effect

RUNTIME = re.compile(r"(\d+) days?, (\d+) hours?, (\d+) minutes?, (\d+) seconds?")

NO_ADDRESSES = (
    "half messages are committed and rolled back at the brokers' remoting ports, whose answers prove that this took effect, but "
    "OPTIONS has neither NAME_SERVERS nor BROKER_ADDRESSES."
)
NO_ADDRESSES_HINT = (
    'Set OPTIONS["NAME_SERVERS"], for example to ["namesrv:9876"]. If only a proxy can be reached, set UNCONFIRMED_ENDS=True; '
    "messages can be lost then."
)
UNCONFIRMED = (
    "UNCONFIRMED_ENDS is on: a proxy's OK to a COMMIT does not prove that the broker has received it. A message is lost if its "
    "broker dies a moment later and no check-back is answered until the broker stops asking."
)


def problems_of_topics(options: RocketMQOptions, topics: Sequence[TopicSpec]) -> list[Finding]:
    """Return an error if OPTIONS lacks what topics of type transaction need, or a warning if it can lose their messages."""
    two_phase = ", ".join(sorted(topic.name for topic in topics if topic.type is TopicType.TRANSACTION))
    if not two_phase:
        return []
    if options.unconfirmed_ends:
        return [risky_option(f"Topics of type transaction ({two_phase}): {UNCONFIRMED}", NO_ADDRESSES_HINT)]
    if not (options.name_servers or options.broker_addresses):
        return [wrong_option(f"Topics of type transaction ({two_phase}): {NO_ADDRESSES}", NO_ADDRESSES_HINT)]
    return []


async def problems_of_brokers(client: RocketMQClient, topics: Sequence[TopicSpec]) -> list[Finding]:
    """Return the problems of each broker that has one of the topics: settings, clock, permissions and consumer groups."""
    if client.options.unconfirmed_ends or not client.remoting.is_configured:
        return []
    problems: list[Finding] = []
    served: dict[str, list[TopicSpec]] = {}  # host:port of a broker -> its topics
    for topic in topics:
        try:
            addresses = await client.remoting.addresses(topic.name)
        except ConnectionError as error:
            return [unavailable(str(error), "Correct NAME_SERVERS, or allow connections to the port.")]
        for address in addresses.values():
            served.setdefault(address, []).append(topic)
    for address, served_topics in served.items():
        problems += await _problems_of(client, address, served_topics)
    return problems


async def _problems_of(client: RocketMQClient, address: str, topics: Sequence[TopicSpec]) -> list[Finding]:
    try:
        config = (await client.remoting.ask(address, Request(requests.GET_BROKER_CONFIG))).checked()
        settings = _settings(config.body.decode())
        asked_at = time.time()
        runtime = (await client.remoting.ask(address, Request(requests.GET_RUNTIME_INFO))).checked()
        clock = _clock(json.loads(runtime.body)["table"])
        problems = [*problems_of_settings(address, client.options, settings), *problems_of_clock(address, clock - asked_at)]
        problems += problems_of_retention(address, settings, topics)
        two_phase = [topic.name for topic in topics if topic.type is TopicType.TRANSACTION]
        for request, permission in _probes(two_phase[-1]) if two_phase else ():
            problems += _permission_problem(address, permission, await client.remoting.ask(address, request))
        problems += await problems_of_groups(client, address, topics)
    except (ConnectionError, RemotingError) as error:
        hint = (
            "Correct NAME_SERVERS or BROKER_ADDRESSES, allow connections to the port, or grant ACCESS_KEY permissions (ACL 2.0)."
        )
        return [unavailable(f"Broker {address} cannot be checked: {error}.", hint)]
    return problems


def problems_of_settings(broker: str, options: RocketMQOptions, settings: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a problem for each setting of a broker that contradicts OPTIONS, or can lose or duplicate messages."""
    timeout, interval, batch = (
        timedelta(milliseconds=int(settings[name]))
        for name in ("transactionTimeOut", "transactionCheckInterval", "transactionOpBatchInterval")
    )
    horizon = timeout + interval * int(settings["transactionCheckMax"])
    if timeout < options.commit_window:
        yield weak(
            f"Broker {broker} asks about half messages after {timeout} (transactionTimeOut), and COMMIT_WINDOW is "
            f"{options.commit_window}: the first check-backs come before they can be answered.",
            "Set transactionTimeOut to COMMIT_WINDOW or more.",
        )
    if options.check_horizon <= horizon:
        yield misconfigured(
            f"Broker {broker} sends check-backs for {horizon} (transactionTimeOut + transactionCheckMax x "
            f"transactionCheckInterval), but CHECK_HORIZON is {options.check_horizon}: rows that an answer needs may be pruned.",
            f"Set CHECK_HORIZON to more than {horizon}.",
        )
    if batch > MAX_BATCH_INTERVAL and int(settings["transactionOpMsgMaxSize"]) > 1:
        yield weak(
            f"Broker {broker} records commits of half messages only every {batch} (transactionOpBatchInterval), and meanwhile "
            "asks about committed ones.",
            "Set transactionOpMsgMaxSize=1 and transactionOpBatchInterval=3600000, so that it records them at once.",
        )
    yield from _problems_of_the_store(broker, settings)


def _problems_of_the_store(broker: str, settings: Mapping[str, str]) -> Iterator[Finding]:
    if settings.get("rejectTransactionMessage") == "true":
        yield misconfigured(
            f"Broker {broker} rejects half messages (rejectTransactionMessage=true).", "Set rejectTransactionMessage=false."
        )
    if settings.get("transientStorePoolEnable") == "true":
        yield misconfigured(
            f"Broker {broker} confirms a message before it is in the page cache (transientStorePoolEnable=true): a broker "
            "that is killed loses confirmed messages.",
            "Set transientStorePoolEnable=false.",
        )
    if settings.get("messageIndexEnable") == "false":
        yield misconfigured(
            f"Broker {broker} has no message index (messageIndexEnable=false): half messages whose commit was not "
            "answered are looked up by reading queues, and check-backs make duplicates.",
            "Set messageIndexEnable=true.",
        )
    elif settings.get("messageIndexSafe") == "false":
        yield weak(
            f"Broker {broker} loses part of its message index when it is killed (messageIndexSafe=false): half messages whose "
            "commit was not answered are then looked up by reading queues, and check-backs may make duplicates.",
            "Set messageIndexSafe=true.",
        )
    if settings.get("flushDiskType") == "ASYNC_FLUSH" and settings.get("brokerRole") == "ASYNC_MASTER":
        yield weak(
            f"Broker {broker} confirms messages before they are on disk or on a replica (flushDiskType=ASYNC_FLUSH, "
            "brokerRole=ASYNC_MASTER): a power failure loses them.",
            "Set flushDiskType=SYNC_FLUSH or brokerRole=SYNC_MASTER if no message may be lost.",
        )


def problems_of_retention(broker: str, settings: Mapping[str, str], topics: Sequence[TopicSpec]) -> Iterator[Finding]:
    """Yield a problem if a broker may keep messages longer than the inbox rows that recognize a second delivery are kept."""
    hours = int(settings["fileReservedTime"])
    needed = timedelta(hours=hours) + CLEAN_UP_INTERVAL + MAX_INVISIBLE
    for remembered in {topic.remembered for topic in topics}:
        names = ", ".join(repr(topic.name) for topic in topics if topic.remembered == remembered)
        subject = f"Broker {broker} keeps messages for {hours} hours (fileReservedTime) and up to a day more (topics {names})"
        if problem := problem_of_retention(subject, needed, remembered, "lower fileReservedTime"):
            yield problem


def _probes(topic: str) -> list[tuple[Request, str]]:
    """Return requests without an effect, each with the permission that it needs."""
    return [
        (requests.end(topic, "", NOWHERE, NOWHERE, requests.ROLLBACK_TYPE), f"Pub on Topic:{topic}, to end half messages"),
        (requests.query(topic, "-"), f"Sub on Topic:{topic}, to look messages up"),
        (requests.query(HALVES, "-"), f"Sub on Topic:{HALVES}, to look half messages up"),
        (
            requests.pull(HALVES, 0, 0),
            f"Sub on Topic:{HALVES} and Group:{requests.READER}, to read messages that the index lacks",
        ),
    ]


def _permission_problem(broker: str, permission: str, answer: RemotingAnswer) -> Iterator[Finding]:
    if answer.code == requests.NO_PERMISSION:
        yield misconfigured(
            f"Broker {broker} denies ACCESS_KEY a permission: {permission}. Its answer: {answer.text}",
            "Grant it (ACL 2.0). Without it no message is lost, but batches whose commit was not answered stay PREPARED.",
        )


def problems_of_clock(broker: str, ahead_seconds: float) -> Iterator[Finding]:
    """Yield a problem if a broker's clock differs from this machine's."""
    if abs(ahead_seconds) > MAX_CLOCK_DIFFERENCE.total_seconds():
        yield Finding(
            "outbox.clock",
            "",
            f"The clocks of broker {broker} and of this machine differ by {abs(ahead_seconds):.0f} s, so the broker asks about "
            "half messages too early, which makes duplicates.",
            "Synchronize both clocks with NTP.",
        )


def _settings(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def _clock(runtime: Mapping[str, str]) -> float:
    """Return the time of a broker's clock, in seconds since 1970: the sum of its start time and its uptime."""
    match = RUNTIME.search(runtime["runtime"])
    if match is None:
        raise BrokerUnavailable(
            f"A broker reports its uptime as {runtime['runtime']!r}, which cannot be parsed.",
            hint="Use a supported version of RocketMQ.",
        )
    days, hours, minutes, seconds = map(int, match.groups())
    running = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    return int(runtime["bootTimestamp"]) / 1000 + running.total_seconds()
