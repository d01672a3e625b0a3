"""
Half first: the broker stores the half message before the work of the transaction begins.

A half message is stored by the broker and hidden from consumers. To *end* it is to commit it or roll it back. In a *check-back*,
the broker asks whether the half message's transaction committed. The *sweep* is a periodic round of each relay.

THE ORDER. The first statements of the transaction insert the message row and its batch, in the state of a batch that is to be
committed. Then the half message is sent, the work is done, the database commits, and the half message is committed. If a
check-back comes before that, its answer waits for the lock on the message row until the transaction has ended. So the answer
agrees with the final state of the database.

While its topic is paused, a message does not go half first: it is stored like any other, and a relay sends it after the pause.

This process may fail to end the half message: it died, was too late, or does not know whether its database commit succeeded. Then
a check-back (`check_backs/resolve.py`) or the sweep (`relay/commit.py`) ends the half message, whichever comes first.
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

if TYPE_CHECKING:  # publishing imports this package, and passes the draft
    from outbox.publishing.draft import Draft


@contextmanager
def open_transaction(draft: Draft, using: str, *, publish: Callable[[], object], about: str | None = None) -> Iterator[None]:
    """
    Open the outermost transaction of a database, with a message that goes half first.

    While the topic is paused, `publish` is called, and the broker is not. A pause that begins later has no effect: the half
    message is committed after its transaction.

    Args:
        publish: stores the message in the transaction, for a relay to send after the pause; called only if the topic is paused.
        about: the row that the message is about, in the form of the column `outbox_message.about`; None if there is none.

    Raises:
        ConfigurationError: the message's topic takes no half messages.
        NotOutermost: the connection is in a transaction already; or Django's autocommit was off, and the connection was closed.
        HalfNotStored: the broker did not confirm that it has stored the half message. The work has not begun.
        BrokenTransaction: the work caught an error that had aborted its transaction. Or a statement or transaction on its
            connection did not end, so it is unknown whether the transaction was committed; then a check-back finds out.
    """
    if problem := topic_problem(draft.topic):
        raise ConfigurationError(f"{draft.subject} cannot go half first: {problem[0]}", hint=problem[1])
    _close_unfinished(draft, using)
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
            raise HalfNotStored(f"{draft.subject} was not sent half first, so nothing was done: {error}") from error
        message = HalfFirstMessage(broker, draft, using, half_id=half_id)
        try:
            with ExitStack() as stack:
                _enter_transaction(stack, draft, using)
                # Registered first, so that it runs before on_commit callbacks of the work, and no savepoint can remove it.
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
            message.is_undone = True  # raised at COMMIT by a deferred constraint, so the server has rolled back
            raise
        finally:
            message.settle()


def topic_problem(topic: str) -> tuple[str, str] | None:
    """Return why messages of a topic cannot go half first, as the end of a sentence, and what to do; None if they can."""
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


def _close_unfinished(draft: Draft, using: str) -> None:
    """Close the connection if it is broken, or if earlier code left it in a transaction that will not be ended."""
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
            f"{draft.subject} cannot go half first inside another transaction of database {using!r}: the half message would be "
            "committed only after that transaction.",
            hint="Remove the atomic() around it; with ATOMIC_REQUESTS, also decorate the view with @non_atomic_requests.",
        ) from error
