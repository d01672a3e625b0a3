"""
Half first: the message goes to its broker, hidden, before the work of its transaction begins.

THE ORDER. Message row and batch are the first statements of the transaction: the fence. Then the half message is sent,
then the work is done, then the database commits, then the half message is committed. Whoever asks about the half message
meanwhile waits for the message row, and so for the transaction: what the database says is what happens.

While its topic is paused a message does not go half first: it waits, as every other does, and a relay sends it after the resume.

What this process does not end, because it died, came too late or does not know how its database commit ended, the
check-back ends (`check_backs/resolve.py`), or the sweep (`relay/sweep.py`): whoever is first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from django.db import IntegrityError
from django.db import transaction as django_transaction

from outbox import conf
from outbox.brokers.capabilities import HalfMessages
from outbox.database.outermost import close_broken, outermost_transaction, refuse_manual, require_alive
from outbox.errors import BrokenTransaction, BrokerUnavailable, ConfigurationError, HalfNotStored, NotOutermost
from outbox.failpoints import failpoint
from outbox.half_first.message import HalfFirstMessage
from outbox.half_first.producers import acquire
from outbox.message import TopicType
from outbox.topics import is_paused, topic_id

if TYPE_CHECKING:  # what publish makes of a message; the room above hands it down
    from outbox.brokers.base import Broker
    from outbox.publishing.draft import Draft


@contextmanager
def open_transaction(draft: Draft, using: str, *, publish: Callable[[], object], about: str | None = None) -> Iterator[None]:
    """
    Open the outermost transaction of a database, with a message that goes half first.

    While the topic is paused, the message is published instead, and the broker is not asked for anything. A pause that comes
    later finds the half message under way: it is committed with its transaction.

    Args:
        publish: writes the message into the open transaction as every other, for a relay to send.
        about: the row the message speaks of, as `outbox_message.about` holds it.

    Raises:
        ConfigurationError: the message's topic takes no half messages.
        NotOutermost: a transaction is open already; or Django's autocommit was off, and the connection was closed.
        HalfNotStored: the half message was not surely stored. The work has not begun.
        BrokenTransaction: the work swallowed an error that its transaction did not survive; or nobody can tell whether it is
            committed, since its connection was left in the middle of something. The check-back finds out.
    """
    if wrong := objection(draft.topic):
        raise ConfigurationError(f"{draft.subject} cannot go half first: {wrong}, or publish() it in the transaction.")
    _close_left(draft, using)
    topic = topic_id(draft.topic, using)
    if is_paused(topic, using):
        with ExitStack() as stack:
            _enter_outermost(stack, draft, using)
            publish()
            yield
        return
    with acquire(draft.broker, using) as broker:
        message = HalfFirstMessage(broker, draft, using, half_id=_new_half_id(broker, draft))
        try:
            with ExitStack() as stack:
                _enter_outermost(stack, draft, using)
                # Before the work, so that it runs before the work's own and outlives every savepoint of the work.
                django_transaction.on_commit(message.commit, using=using, robust=True)
                prepared = message.write_fence(topic, about=about)
                failpoint("half_first.after_fence")
                message.send(prepared, about=about)
                with message.undone_by_an_exception():
                    failpoint("half_first.after_half")
                    yield
                    failpoint("half_first.after_work")
                    message.is_undone = django_transaction.get_rollback(using)
                    if not message.is_undone:
                        require_alive(using, f"The transaction of {draft.subject}", has_begun=True)
        except IntegrityError:
            message.is_undone = True  # at COMMIT: a deferred constraint, so the server itself has rolled back
            raise
        finally:
            message.settle()


def objection(topic: str) -> str | None:
    """Return why nothing can go half first to a topic, and what to do; None where it can."""
    settings = conf.topic_settings(topic)
    broker = conf.broker_class(settings.broker)
    if settings.type is not TopicType.TRANSACTION:
        return f"topic {topic!r} is of type {settings.type}. Make it of type transaction, on a broker with half messages"
    if not broker.supports_half_messages:
        place = f"topic {topic!r} is on broker {settings.broker!r} ({broker.__name__})"
        return f"{place}, which has no half messages. Give the topic another one"
    return None


def _new_half_id(broker: Broker, draft: Draft) -> str:
    try:
        return HalfMessages.of(broker).new_half_id(str(draft.id))
    except BrokerUnavailable as error:
        raise HalfNotStored(f"{draft.subject} was not sent half first, nothing was done: {error}") from error


def _close_left(draft: Draft, using: str) -> None:
    """Open a connection that answers; one that was left in a transaction of nobody's is closed."""
    try:
        refuse_manual(using)
    except BrokenTransaction as error:
        raise NotOutermost(f"{draft.subject} cannot go half first. {error}") from error
    close_broken(using)


def _enter_outermost(stack: ExitStack, draft: Draft, using: str) -> None:
    try:
        stack.enter_context(outermost_transaction(using))
    except RuntimeError as error:
        raise NotOutermost(
            f"{draft.subject} cannot go half first inside a transaction of database {using!r} that is open already: its half "
            "message is committed when that transaction is, not before. Take the atomic() around it away; under "
            "ATOMIC_REQUESTS decorate the view with @non_atomic_requests too."
        ) from error
