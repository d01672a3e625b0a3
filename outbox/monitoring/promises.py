"""The promises about the messages of a topic, computed from its type, its broker's options and the settings."""

from __future__ import annotations

import msgspec

from outbox import conf
from outbox.brokers.base import SendGuarantee
from outbox.brokers.capabilities import HalfMessages, Receives
from outbox.message import TopicType
from outbox.monitoring.text import age

PUBLISHED = {
    SendGuarantee.ONCE: "Published once: a message that is sent again is not stored again.",
    SendGuarantee.ONCE_COMMITTED: "Published once for readers with isolation.level=read_committed; others also see copies of "
    "transactions that were not committed.",
    SendGuarantee.AT_LEAST_ONCE: "Published at least once: a copy follows when a relay dies before it has recorded the broker's "
    "answer.",
    SendGuarantee.UNCONFIRMED: "Published, but not confirmed: a message is lost if its commit, which the proxy accepted, did "
    "not reach the broker.",
}
ORDERED = "Messages with the same key are delivered in the order of the database commits."
UNORDERED = "Messages are delivered in any order."
DROPPED = "A consumer group drops copies of a message that it has handled, for {kept} at least (RETENTION)."
ONLY_SENT = "No consumer group of the outbox reads them, so nothing drops a copy."
CHECKED_BACK = (
    "For {age}, check-backs are answered COMMIT or ROLLBACK from the row in the database, and UNKNOWN while it is undecided."
)
NOT_CHECKED_BACK = "Messages are sent in one phase, so there are no check-backs."


class Promise(msgspec.Struct, frozen=True):
    """
    The promises about the messages of a topic, a sentence each.

    Args:
        how_often: how often readers see a published message; `published` is the sentence about it.
    """

    how_often: SendGuarantee
    published: str
    order: str
    duplicates: str
    check_backs: str


def promise_of(topic: str) -> Promise:
    """
    Return the promises about a topic in the settings.

    Raises:
        UnknownTopic: it is not in `OUTBOX["TOPICS"]`.
        ConfigurationError: its broker's client is not installed, or the options are wrong.
    """
    settings = conf.topic_settings(topic)
    kind, options = conf.broker_class(settings.broker), conf.settings().brokers[settings.broker].options
    spec = conf.topic_spec(topic)
    limits = kind.limits(options, spec)
    check_backs = NOT_CHECKED_BACK
    if spec.type is TopicType.TRANSACTION and HalfMessages.has(kind):
        check_backs = CHECKED_BACK.format(age=age(limits.check_back.total_seconds()))
    return Promise(
        limits.guarantee,
        PUBLISHED[limits.guarantee],
        ORDERED if spec.type is TopicType.FIFO else UNORDERED,
        DROPPED.format(kept=age(conf.settings().retention.total_seconds())) if Receives.has(kind) else ONLY_SENT,
        check_backs,
    )
