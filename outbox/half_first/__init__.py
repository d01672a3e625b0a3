"""
Half first: the broker stores the half message before the work of the transaction begins.

THE ORDER. The first statements of the transaction insert the message row and its decided batch. Then the half message is
sent, the work is done, the database commits, and the half message is committed. A check-back in the meantime waits for the
lock on the message row, and so for the end of the transaction. It therefore answers what the database finally holds.

While its topic is paused, a message does not go half first: it is stored like any other, and a relay sends it after the resume.

A half message that this process does not end, because it died, was too late or does not know the outcome of its database
commit, is ended by the check-back (`check_backs/resolve.py`) or by the sweep (`relay/commit.py`), whichever comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from django.db import IntegrityError
from django.db import transaction as django_transaction

from outbox import conf
from outbox.brokers.capabilities import HalfMessages
from outbox.database.guarded import close_broken, guarded_transaction, refuse_manual, require_alive
from outbox.errors import BrokenTransaction, BrokerUnavailable, ConfigurationError, HalfNotStored, NotOutermost
from outbox.failpoints import failpoint
from outbox.half_first.message import HalfFirstMessage
from outbox.half_first.producers import acquire
from outbox.message import TopicType
from outbox.topics import is_paused, topic_id

if TYPE_CHECKING:  # publishing is above this package, and passes the draft in
    from outbox.publishing.draft import Draft


@contextmanager
def open_transaction(draft: Draft, using: str, *, publish: Callable[[], object], about: str | None = None) -> Iterator[None]:
    """
    Open the outermost transaction of a database, with a message that goes half first.

    While the topic is paused, the message is published as usual and the broker is not called. A pause that begins later has no
    effect on the half message: it is committed with its transaction.

    Args:
        publish: writes the message in the open transaction, for a relay to send.
        about: the row that the message is about, in the form of the column `outbox_message.about`.

    Raises:
        ConfigurationError: the message's topic takes no half messages.
        NotOutermost: a transaction is open already; or Django's autocommit was off, and the connection was closed.
        HalfNotStored: the broker did not confirm that it has stored the half message. The work has not begun.
        BrokenTransaction: the work swallowed an error that aborted its transaction; or it is unknown whether the transaction was
            committed, since its connection was left inside a statement or transaction. The check-back finds out.
    """
    if problem := topic_problem(draft.topic):
        raise ConfigurationError(f"{draft.subject} cannot go half first: {problem[0]}", hint=problem[1])
    _close_left(draft, using)
    topic = topic_id(draft.topic, using)
    if is_paused(topic, using):
        with ExitStack() as stack:
            _enter_transaction(stack, draft, using)
            publish()
            yield
        return
    with acquire(draft.broker, using) as broker:
        try:
            half_id = HalfMessages.of(broker).new_half_id(str(draft.id))
        except BrokerUnavailable as error:
            raise HalfNotStored(f"{draft.subject} was not sent half first, nothing was done: {error}") from error
        message = HalfFirstMessage(broker, draft, using, half_id=half_id)
        try:
            with ExitStack() as stack:
                _enter_transaction(stack, draft, using)
                # Registered before the work: it runs before the work's own callbacks, and no rolled back savepoint removes it.
                django_transaction.on_commit(message.commit, using=using, robust=True)
                message.prepare(topic, about=about)
                failpoint("half_first.after_prepare")
                message.send(about=about)
                with message.undone_by_an_exception():
                    failpoint("half_first.after_half")
                    yield
                    failpoint("half_first.after_work")
                    message.is_undone = django_transaction.get_rollback(using)
                    require_alive(using, f"The transaction of {draft.subject}", has_begun=True)
        except IntegrityError:
            message.is_undone = True  # at COMMIT: a deferred constraint, so the server itself has rolled back
            raise
        finally:
            message.settle()


def topic_problem(topic: str) -> tuple[str, str] | None:
    """Return why messages of a topic cannot go half first, as the end of a sentence, and what to do; None where they can."""
    settings = conf.topic_settings(topic)
    broker = conf.broker_class(settings.broker)
    if settings.type is not TopicType.TRANSACTION:
        return (
            f"topic {topic!r} is of type {settings.type}.",
            "Use the type transaction, on a broker with half messages, or publish() the message in the transaction.",
        )
    if not HalfMessages.has(broker):
        return (
            f"topic {topic!r} is on broker {settings.broker!r} ({broker.__name__}), which has no half messages.",
            "Use another broker for the topic, or publish() the message in the transaction.",
        )
    return None


def _close_left(draft: Draft, using: str) -> None:
    """Close the connection where it is broken, or was left inside a transaction that no code will end."""
    try:
        refuse_manual(using)
    except BrokenTransaction as error:
        raise NotOutermost(f"{draft.subject} cannot go half first. {error.message}", error.hint) from error
    close_broken(using)


def _enter_transaction(stack: ExitStack, draft: Draft, using: str) -> None:
    try:
        stack.enter_context(guarded_transaction(using))
    except RuntimeError as error:
        raise NotOutermost(
            f"{draft.subject} cannot go half first inside a transaction of database {using!r} that is open already: its half "
            "message is committed when that transaction is, not before.",
            hint="Remove the atomic() around it; with ATOMIC_REQUESTS, also decorate the view with @non_atomic_requests.",
        ) from error
