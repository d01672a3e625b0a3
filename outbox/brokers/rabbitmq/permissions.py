"""Permissions of our user: which one is missing, and the command that grants all."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import amqp
from amqp.exceptions import AccessRefused, PreconditionFailed

from outbox.brokers.rabbitmq import topology
from outbox.brokers.rabbitmq.client import describe
from outbox.findings import Finding, misconfigured
from outbox.message import TopicSpec

# No number, so the server refuses the subscription, but only after it has checked the permission.
REFUSED = {"x-priority": "none"}

# Method and resource of a refusal -> the missing permission.
MISSING = {
    ("Exchange.declare", "exchange"): "configure",
    ("Queue.declare", "queue"): "configure or read",
    ("Queue.declare", "exchange"): "write",
    ("Queue.bind", "queue"): "write",
    ("Queue.bind", "exchange"): "read",
    ("Exchange.bind", "exchange"): "write or read",
    ("Exchange.unbind", "exchange"): "write",
    ("Basic.publish", "exchange"): "write",
    ("Basic.consume", "queue"): "read",
}


class Permissions:
    """
    The permissions of a user.

    Args:
        topics: names of the topics that it sends to, or receives from.
    """

    def __init__(self, user: str, virtual_host: str, topics: Iterable[str]) -> None:
        self._user = user
        self._virtual_host = virtual_host
        self._topics = sorted(topics)

    def problem(self, what: str, error: AccessRefused) -> Finding:
        """Return what cannot be done without a permission. `what`: begins the sentence."""
        text = describe(error)
        kind = "queue" if "access to queue" in text else "exchange"
        missing = MISSING.get((str(error.method_name), kind), "configure, write or read")
        return misconfigured(
            f"{what}: user {self._user!r} lacks the permission to {missing}: {text}.", f"Grant it: {self.command()}"
        )

    def command(self) -> str:
        """Return the command that grants all that is needed."""
        ours = rf"outbox\.owner\..*|({'|'.join(map(re.escape, self._topics))})(:.*)?"
        written = rf"{ours}|amq\.default"
        return f"rabbitmqctl set_permissions -p {self._virtual_host} {self._user} '^({ours})$' '^({written})$' '^({ours})$'"

    def problems_of_groups(self, channel: amqp.Channel, groups: Sequence[tuple[TopicSpec, str]]) -> Iterator[Finding]:
        """Return which topics cannot be written to, and which queues cannot be read."""
        for topic in self._topics:
            unbind = partial(channel.exchange_unbind, topic, topic, routing_key=uuid.uuid4().hex)  # there is no such binding
            yield from self._refused(f"Topic {topic!r}", unbind)
        for spec, group in groups:
            for queue in topology.group_queues(spec.name, group):
                consume = partial(channel.basic_consume, queue, arguments=REFUSED)
                yield from self._refused(f"Group {group!r} of topic {spec.name!r}", consume)

    def _refused(self, what: str, ask: Callable[[], object]) -> Iterator[Finding]:
        try:
            ask()
        except AccessRefused as error:
            yield self.problem(what, error)
        except PreconditionFailed:
            pass  # the permission is there
