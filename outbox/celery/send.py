"""Send Celery's tasks in a transaction: each task becomes a message row of the topic `celery-tasks`."""

from __future__ import annotations

from functools import partial
from typing import Any

from celery import Celery
from celery.canvas import Signature, chunks
from django.db import transaction
from kombu.serialization import dumps

from outbox import conf
from outbox.brokers.options import read_options
from outbox.celery.canvas import CapturingProducer, capture, require_supported
from outbox.celery.options import CeleryOptions, find_app
from outbox.celery.stored import CONTENT_TYPE, TOPIC
from outbox.errors import ConfigurationError
from outbox.publishing.draft import compose_encoded
from outbox.publishing.functions import publish_drafts
from outbox.publishing.transactions import choose_database

PROTOCOL = 2


def send_in_transaction(signature: Signature[Any], *, using: str | None = None) -> Any:
    """
    Send a task, a chain or a group if the open transaction commits, and not if it is rolled back.

    Set options on the signature: `send_in_transaction(add.s(1, 2).set(countdown=60))`. They are stored with the task, and times
    such as a countdown start with this call. docs/how-to/celery-tasks.md lists the supported options.

    With `task_always_eager` nothing is stored, and the task runs in this process after the commit.

    Args:
        signature: `task.s(...)`, `task.si(...)`, `app.signature(...)`, `chain(...)` or `group(...)`.
        using: the database's alias. By default that of the innermost `outbox.atomic()`, otherwise the one that routers choose.

    Returns:
        The result object that `apply_async` would return, with the task's id. A worker stores the result later.

    Raises:
        NotInTransaction: the database has no open transaction.
        InvalidMessage: the signature has an option that is not supported, or begins with a chord.
        ConfigurationError: `OUTBOX["BROKERS"]` has no CeleryBroker, or one for another Celery app; or task_protocol is 1.
        kombu.exceptions.EncodeError: the serializer cannot encode the arguments.
    """
    if TOPIC not in conf.settings().topics:
        raise ConfigurationError(
            'OUTBOX["BROKERS"] has no broker for Celery\'s tasks.',
            hint='Add one: "celery": {"BACKEND": "outbox.celery.CeleryBroker"}.',
        )
    app = signature.app
    if app.conf.task_protocol != PROTOCOL:
        raise ConfigurationError(
            f"The outbox sends Celery's protocol {PROTOCOL} only.", hint="Remove task_protocol from Celery's settings."
        )
    _require_same_app(signature)
    subject = f"Task {signature.task}"
    alias = choose_database(subject, using=using, about=None)
    if app.conf.task_always_eager:
        return _run_after_commit(app, signature, alias)
    producer = CapturingProducer(app)
    # A clone of chunks would not be an instance of chunks.
    result = capture(signature if isinstance(signature, chunks) else signature.clone(), producer)
    drafts = [
        compose_encoded(f"Task {task}", TOPIC, body, type=task, key=task_id, content_type=CONTENT_TYPE)
        for task, task_id, body in producer.captured
    ]
    publish_drafts(drafts, using=alias)
    parent = app.current_worker_task
    if parent and signature.options.get("add_to_parent", True):  # after the commit, since only then the child is certainly sent
        transaction.on_commit(partial(parent.add_trail, result), using=alias, robust=True)
    return result


def _require_same_app(signature: Signature[Any]) -> None:
    """Raise ConfigurationError if the broker publishes for another app, since the task would go to that app's server."""
    alias = conf.topic_settings(TOPIC).broker
    if conf.broker_class(alias).system != "celery":  # a test has replaced the broker
        return
    app = find_app(read_options(CeleryOptions, conf.settings().brokers[alias].options))
    if app.main != signature.app.main or app.conf.broker_url != signature.app.conf.broker_url:
        raise ConfigurationError(
            f"Task {signature.task} belongs to the Celery app {signature.app.main!r}, but broker {alias!r} sends to the server "
            f"of {app.main!r}.",
            hint='Name the app in OPTIONS["APP"] of that broker; only the tasks of one app can be sent in transactions.',
        )


def _run_after_commit(app: Celery, signature: Signature[Any], alias: str) -> Any:
    """Run a task in this process after the commit. If its options or arguments could not be sent, this raises at once."""
    require_supported(signature)
    signature = signature.clone()
    serializer = signature.options.get("serializer") or getattr(app.tasks.get(str(signature.task)), "serializer", None)
    dumps((signature.args, signature.kwargs), serializer=serializer or app.conf.task_serializer)
    result = signature.freeze()
    transaction.on_commit(signature.apply_async, using=alias)
    return result
