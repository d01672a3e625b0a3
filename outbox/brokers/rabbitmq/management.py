"""
Checks that need the management plugin: of bindings and policies, which AMQP clients cannot query, and of quorum queues' members.

Source: the HTTP API of RabbitMQ's management plugin, `GET /api/queues/{virtual host}` and `/api/bindings/{virtual host}`.
"""

from __future__ import annotations

import base64
import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Collection, Iterator
from http.client import HTTPException
from typing import Any

from outbox.brokers.rabbitmq.options import RabbitMQOptions
from outbox.brokers.rabbitmq.topology import group_queues, queue_name
from outbox.findings import Finding, misconfigured, weak

COLUMNS = ("name", "members", "online", "policy", "operator_policy", "effective_policy_definition")
ENOUGH_MEMBERS = 3  # with three members, a queue survives the loss of one node

# The effects of a policy's keys on our queues. On a quorum queue, a policy overrides the arguments of the queue, or the lower
# value of both applies.
POLICY_EFFECTS = {
    "overflow": "a full queue may drop messages that were confirmed",
    "max-length": "the queue is full with fewer messages",
    "max-length-bytes": "the queue is full with fewer messages",
    "message-ttl": "messages expire before their time, and messages in a group's dead-letter queue are lost",
    "delivery-limit": "messages are given up after this number of deliveries",
    "expires": "a queue that no consumer uses is deleted with its messages",
    "dead-letter-exchange": "dead letters do not reach the group's dead-letter queue",
    "dead-letter-routing-key": "dead letters do not reach the group's dead-letter queue",
    "dead-letter-strategy": "dead letters may be lost before they reach the group's dead-letter queue",
}


def problems_of_queues(options: RabbitMQOptions, groups: Collection[tuple[str, str]]) -> Iterator[Finding]:
    """
    Yield queues that are not bound, that a policy changes, or that have too few members. Without MANAGEMENT_URL, yield nothing.

    Args:
        groups: pairs of a topic and a group of it.
    """
    if not options.management_url:
        return
    try:
        queues = _get_rows(options, "queues", COLUMNS)
        bindings = _get_rows(options, "bindings", ("source", "destination"))
    except (OSError, ValueError, HTTPException) as error:
        hint = 'Correct OPTIONS["MANAGEMENT_URL"], or give USER the tag management: rabbitmqctl set_user_tags USER management'
        yield weak(f"The management API of RabbitMQ does not answer: {error}.", hint)
        return
    bound = {(binding["source"], binding["destination"]) for binding in bindings}
    for topic, group in groups:
        if (topic, queue_name(topic, group)) not in bound:
            text = f"Queue {queue_name(topic, group)!r} is not bound to topic {topic!r}: group {group!r} gets nothing."
            hint = (
                "Find out who removed the binding, and send the missed messages again. The relay binds the queue with the next "
                "message."
            )
            yield weak(text, hint)
    names = {name for topic, group in groups for name in group_queues(topic, group)}
    ours = [queue for queue in queues if queue["name"] in names]
    yield from _problems_of_policies(ours)
    yield from _problems_of_members(ours, min(len(options.nodes), ENOUGH_MEMBERS))


def _problems_of_policies(queues: list[dict[str, Any]]) -> Iterator[Finding]:
    for key, effect in POLICY_EFFECTS.items():
        changed = [queue for queue in queues if key in (queue.get("effective_policy_definition") or {})]
        if not changed:
            continue
        policies = {str(queue[kind]) for queue in changed for kind in ("policy", "operator_policy") if queue.get(kind)}
        names = ", ".join(sorted(repr(name) for name in policies))
        value = changed[0]["effective_policy_definition"][key]
        yield misconfigured(
            f"A policy ({names}) sets {key}={value!r} for {_names_of(changed)}: {effect}.",
            "Change the pattern of the policy, so that it does not match these queues.",
        )


def _problems_of_members(queues: list[dict[str, Any]], wanted: int) -> Iterator[Finding]:
    if few := [queue for queue in queues if len(queue.get("members", ())) < wanted]:
        count = min(len(queue.get("members", ())) for queue in few)
        yield misconfigured(
            f"{_names_of(few)}: {count} member{'' if count == 1 else 's'}, where {wanted} nodes can have one. If a node is lost, "
            "messages are lost or wait for it.",
            "Add members: rabbitmq-queues grow NODE all",
        )
    if lost := [queue for queue in queues if 2 * len(queue.get("online", ())) <= len(queue.get("members", ()))]:
        text = f"{_names_of(lost)}: most members are offline, so messages can be neither sent nor received."
        yield misconfigured(text, "Start the nodes that are down.")


def _get_rows(options: RabbitMQOptions, kind: str, columns: Collection[str]) -> list[dict[str, Any]]:
    """Return the queues or the bindings of our virtual host. Raises OSError, ValueError or HTTPException."""
    path = f"/api/{kind}/{urllib.parse.quote(options.virtual_host, safe='')}?columns={','.join(columns)}"
    credentials = base64.b64encode(f"{options.user}:{options.password}".encode()).decode()
    headers = {"Authorization": f"Basic {credentials}"}
    request = urllib.request.Request(options.management_url.rstrip("/") + path, headers=headers)  # noqa: S310  (options check it)
    tls = ssl.create_default_context(cafile=options.tls_ca_file or None) if request.type == "https" else None
    timeout = options.request_timeout.total_seconds()
    with urllib.request.urlopen(request, timeout=timeout, context=tls) as answer:  # noqa: S310
        rows: list[dict[str, Any]] = json.load(answer)
    return rows


def _names_of(queues: list[dict[str, Any]]) -> str:
    names = sorted(str(queue["name"]) for queue in queues)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"queue{'' if len(names) == 1 else 's'} {', '.join(map(repr, names[:3]))}{more}"
