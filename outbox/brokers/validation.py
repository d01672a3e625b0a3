"""Validation of messages that all brokers share, before anything is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

from outbox.brokers.base import Broker, Outgoing, SendResult, SendStatus
from outbox.errors import UnknownTopic
from outbox.findings import Finding, weak
from outbox.message import TopicSpec, TopicType

TOO_LATE = SendResult(SendStatus.UNAVAILABLE, reason="Not sent, since the time in which the half message may be ended was over.")
"""The result of a COMMIT or ROLLBACK that was not sent because of `within`."""


def validate(message: Outgoing, topics: Mapping[str, TopicSpec], *, is_half: bool, max_body_bytes: int) -> SendResult | None:
    """Return the result that rejects a message, or None. The topic is checked first, since an operator can correct it."""
    topic = topics.get(message.topic)
    if topic is None:
        return _misconfigured(f"There is no topic {message.topic!r} here. Create it, or correct the name.")
    if is_half is not (topic.type is TopicType.TRANSACTION):
        accepted = "half messages only" if topic.type is TopicType.TRANSACTION else "no half messages"
        return _misconfigured(f"Topic {topic.name!r} is of type {topic.type}: it takes {accepted}.")
    if message.deliver_at is not None and topic.type is not TopicType.DELAY:
        return _misconfigured(f"Topic {topic.name!r} is of type {topic.type}: only a topic of type delay takes a delivery time.")
    if topic.type is TopicType.FIFO and not message.key:
        return SendResult(SendStatus.REFUSED, reason=f"Topic {topic.name!r} keeps order by key; the message has no key.")
    if not 1 <= len(message.body) <= max_body_bytes:
        return SendResult(
            SendStatus.REFUSED, reason=f"The body has {len(message.body)} bytes; 1 to {max_body_bytes} are allowed."
        )
    if not _is_text(message):
        return SendResult(SendStatus.REFUSED, reason="Id, key or tag contains a NUL, or a text contains a lone surrogate.")
    return None


def send_valid(
    broker: Broker, messages: Sequence[Outgoing], send: Callable[[list[Outgoing]], list[SendResult]], *, is_half: bool = False
) -> list[SendResult]:
    """Send the messages that are not rejected; return the results of all, in their order."""
    limit = broker.max_body_bytes
    rejections = [validate(message, broker.topics, is_half=is_half, max_body_bytes=limit) for message in messages]
    valid = [message for message, rejection in zip(messages, rejections, strict=True) if rejection is None]
    results = iter(send(valid) if valid else ())
    return [rejection or next(results) for rejection in rejections]


def _is_text(message: Outgoing) -> bool:
    names = f"{message.message_id}{message.key}{message.tag}"
    try:
        "".join((names, *message.headers, *message.headers.values())).encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in names


def known_topic(topics: Mapping[str, TopicSpec], name: str) -> TopicSpec:
    """
    Return a topic by its name.

    Raises:
        UnknownTopic: the broker has no such topic.
    """
    if name not in topics:
        known = ", ".join(sorted(topics)) or "none"
        raise UnknownTopic(f"The broker has no topic {name!r}, only {known}.", hint="Correct the name, or add the topic.")
    return topics[name]


def _misconfigured(reason: str) -> SendResult:
    return SendResult(SendStatus.MISCONFIGURED, reason=reason)


def problem_of_retention(subject: str, kept: timedelta, remembered: timedelta, remedy: str) -> Finding | None:
    """
    Return a problem if messages may be delivered again after their inbox rows were deleted.

    Args:
        subject: a main clause that says what keeps the messages, and for how long.
        kept: how long after its handling a message may be delivered again.
        remembered: how long inbox rows are kept.
        remedy: an alternative to keeping inbox rows longer, as an imperative.
    """
    if kept <= remembered:
        return None
    return weak(
        f"{subject}, but inbox rows are kept for {remembered}: a message whose acknowledgement was lost may be delivered and "
        "handled again after that.",
        f'Set OUTBOX["RETENTION"] to {kept} or more, or {remedy}.',
    )
