"""OPTIONS of the RabbitMQ broker."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from outbox.brokers.base import TopicSpec
from outbox.brokers.options import BrokerOptions, problems_with, read_address, read_options
from outbox.findings import Finding, risky_option, wrong_option

MAX_HEARTBEAT = timedelta(seconds=65_535)
MAX_NAME_BYTES = 127  # of a group; a queue's name contains topic and group, and AMQP limits it to 255 bytes
URL = re.compile(r"https?://\S+")


class RabbitMQOptions(BrokerOptions, frozen=True):
    """The addresses of the nodes, settings of connections, and properties of the queues."""

    nodes: list[str]  # host or host:port; the first that answers is used
    user: str = "guest"
    password: str = "guest"
    virtual_host: str = "/"
    tls: bool = False
    tls_ca_file: str = ""  # PEM of the authority that signed the nodes' certificates; "": the system's
    # Topic -> consumer groups of other projects. The relay declares their queues before the first message, like those of all
    # groups with a @consumer in this project's code. The queue of any other group is declared when the group first receives.
    groups: dict[str, list[str]] = {}
    heartbeat: timedelta = timedelta(seconds=20)  # a connection without traffic for twice this time is lost
    request_timeout: timedelta = timedelta(seconds=5)  # also for the confirms of one batch
    # The same value as on the server, which takes older deliveries back, and closes their channel.
    consumer_timeout: timedelta = timedelta(minutes=30)
    # URL of the management plugin, such as "http://rabbit-1:15672". Only checks use it, for policies and members of quorum
    # queues.
    management_url: str = ""
    # The maximum number of messages in the queue of one group. A full queue refuses more.
    max_length: Annotated[int, msgspec.Meta(ge=1, le=9223372036854775807)] | None = None


def problems(raw: Mapping[str, Any]) -> list[Finding]:
    """Return wrong names and types of options; if there are none, wrong values."""
    if findings := problems_with(RabbitMQOptions, raw):
        return findings
    options = read_options(RabbitMQOptions, raw)
    findings = [
        wrong_option(f'OPTIONS["NODES"] has {node!r}, which is not host:port.', 'Write it like "rabbit-1:5672".')
        for node in options.nodes
        if read_address(node) is None
    ]
    if not options.nodes:
        findings.append(wrong_option('OPTIONS["NODES"] is empty.', 'Name at least one node, such as "rabbit-1:5672".'))
    if options.heartbeat > MAX_HEARTBEAT:
        text = f'OPTIONS["HEARTBEAT"] is {options.heartbeat}, which AMQP cannot express.'
        findings.append(wrong_option(text, f"Set it to {MAX_HEARTBEAT.seconds} s or less."))
    if not options.virtual_host:
        findings.append(
            wrong_option('OPTIONS["VIRTUAL_HOST"] is empty.', 'Name it. The default virtual host of a server is "/".')
        )
    findings.extend(
        wrong_option(f'OPTIONS["GROUPS"]["{topic}"] has the group {name!r}.', f"Its name has 1 to {MAX_NAME_BYTES} bytes.")
        for topic, names in options.groups.items()
        for name in names
        if not 0 < len(name.encode()) <= MAX_NAME_BYTES
    )
    if options.management_url and not URL.fullmatch(options.management_url):
        text = f'OPTIONS["MANAGEMENT_URL"] is {options.management_url!r}, which is not a URL.'
        findings.append(wrong_option(text, 'Write it like "http://rabbit-1:15672".'))
    if options.tls_ca_file and not (options.tls and Path(options.tls_ca_file).is_file()):
        text = f'OPTIONS["TLS_CA_FILE"] is {options.tls_ca_file!r}; there is no such file, or TLS is off.'
        findings.append(wrong_option(text, "Give the path of a PEM file, and TLS=True."))
    return findings


def with_groups(options: RabbitMQOptions, topics: Sequence[TopicSpec]) -> RabbitMQOptions:
    """Return the options with the groups of this project's @consumers added to GROUPS."""
    named = {topic.name: sorted({*options.groups.get(topic.name, ()), *topic.groups}) for topic in topics}
    return replace(options, groups=named)


def misspelt_groups(options: RabbitMQOptions, topics: Sequence[TopicSpec]) -> Iterator[Finding]:
    """Yield groups of GROUPS that seem to be misspelt, because a group with a @consumer has a similar name."""
    for topic in topics:
        for name in set(options.groups.get(topic.name, ())) - topic.groups:
            if similar := difflib.get_close_matches(name, topic.groups, n=1):
                text = f'OPTIONS["GROUPS"]["{topic.name}"] names the group {name!r}, in which no @consumer of this project is.'
                hint = (
                    f"Did you mean {similar[0]!r}? It needs no entry. Messages wait in the queue of {name!r} for its consumers."
                )
                yield risky_option(text, hint)


def addresses(options: RabbitMQOptions) -> list[str]:
    """Return the nodes as host:port. The port may be the default one."""
    port = 5671 if options.tls else 5672
    return [node if re.search(r":\d+$", node) else f"{node}:{port}" for node in options.nodes]
