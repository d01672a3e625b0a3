"""Checks the permissions of our user: names the missing one, and the command that grants all that are needed."""

from __future__ import annotations

import re
import shlex
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import amqp
from amqp.exceptions import AccessRefused, PreconditionFailed

from outbox.brokers.rabbitmq import topology
from outbox.brokers.rabbitmq.client import describe
from outbox.findings import Finding, misconfigured
from outbox.message import TopicSpec

# A priority must be a number, so the server refuses the subscription, but only after it has checked the permission.
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
        topics: names of the topics that the user sends to or receives from.
    """

    def __init__(self, user: str, virtual_host: str, topics: Iterable[str]) -> None:
        self._user = user
        self._virtual_host = virtual_host
        self._topics = sorted(topics)

    def problem(self, subject: str, error: AccessRefused) -> Finding:
        """Return the finding for a refused request. `subject`, the topic or group that it concerns, begins the sentence."""
        text = describe(error)
        kind = "queue" if "access to queue" in text else "exchange"
        missing = MISSING.get((str(error.method_name), kind), "configure, write or read")
        return misconfigured(
            f"{subject}: user {self._user!r} lacks the permission to {missing}: {text}.", f"Grant it: {self.command()}"
        )

    def command(self) -> str:
        """Return the command that grants all permissions that are needed."""
        ours = rf"outbox\.owner\..*|({'|'.join(map(re.escape, self._topics))})(:.*)?"
        written = rf"{ours}|amq\.default"
        names = (self._virtual_host, self._user, f"^({ours})$", f"^({written})$", f"^({ours})$")
        return f"rabbitmqctl set_permissions -p {shlex.join(names)}"

    def problems_of_groups(self, channel: amqp.Channel, groups: Sequence[tuple[TopicSpec, str]]) -> Iterator[Finding]:
        """Yield topics that this user may not write to, and groups whose queues it may not read."""
        for topic in self._topics:
            unbind = partial(channel.exchange_unbind, topic, topic, routing_key=uuid.uuid4().hex)  # there is no such binding
            yield from self._problem_of_request(f"Topic {topic!r}", unbind)
        for spec, group in groups:
            for queue in topology.group_queues(spec.name, group):
                consume = partial(channel.basic_consume, queue, arguments=REFUSED)
                yield from self._problem_of_request(f"Group {group!r} of topic {spec.name!r}", consume)

    def _problem_of_request(self, subject: str, request: Callable[[], object]) -> Iterator[Finding]:
        try:
            request()
        except AccessRefused as error:
            yield self.problem(subject, error)
        except PreconditionFailed:
            pass  # the permission was granted
