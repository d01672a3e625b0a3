"""
Build the messages of a signature by Celery's own code, without sending them.

A chain becomes one message, which contains the chain's other tasks; a worker sends the next task. A group becomes a message for
each of its tasks. A chord is rejected, because Celery writes it into the result backend when it is sent, and a rollback of the
transaction would not remove it there.

Celery passes its messages to a producer that keeps them instead of sending them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import msgspec
from celery import Celery
from celery.canvas import Signature, chord, chunks, group, maybe_signature
from celery.canvas import _chain as Chain  # the public name `chain` is that of a factory
from celery.result import AsyncResult, GroupResult
from celery.utils import uuid
from kombu import Exchange, Queue
from kombu.compression import compress
from kombu.serialization import dumps
from kombu.utils.functional import maybe_list
from vine import barrier

from outbox.celery.stored import encode
from outbox.errors import InvalidMessage

PERSISTENT = 2
MODES = {"persistent": PERSISTENT, "transient": 1}


class _NoConnection:
    """Stands for the connection of a producer that has none."""

    def _reraise_as_library_errors(self) -> nullcontext[None]:  # Celery asks for it around a send
        return nullcontext()


class CapturingProducer(msgspec.Struct):
    """
    Keeps the messages that are published. It has the methods of kombu's producer that Celery calls.

    Args:
        ignore_result: the header `ignore_result` of the next message. The call of `apply_async` always has ignore_result=True,
            because otherwise Celery would use the result backend before the transaction is committed.
        captured: for each task its name, its id, and the body of its message row.
    """

    app: Celery
    ignore_result: bool | None = None
    captured: list[tuple[str, str, bytes]] = msgspec.field(default_factory=list)
    connection: _NoConnection = msgspec.field(default_factory=_NoConnection)
    serializer: str | None = None

    def publish(
        self,
        body: Any,
        *,
        headers: Mapping[str, Any],
        exchange: Exchange | str | None = None,
        routing_key: str | None = None,
        declare: Sequence[Any] | None = None,
        serializer: str | None = None,
        compression: str | None = None,
        delivery_mode: int | str | None = None,
        expiration: float | None = None,
        **properties: Any,
    ) -> None:
        """
        Encode a message as kombu's producer does, and keep it.

        Raises:
            kombu.exceptions.EncodeError: the serializer cannot encode the arguments.
            InvalidMessage: the outbox cannot store the message without changing it.
        """
        if "task" not in headers:  # it is an event about the task
            return
        for name in ("retry", "retry_policy", "timeout", "confirm_timeout", "mandatory", "immediate"):
            properties.pop(name, None)  # these options concern the send, which the relay does in its own way
        if expiration is not None:
            properties["expiration"] = str(int(expiration * 1000))
        name = headers["task"]
        properties["delivery_mode"] = MODES.get(str(delivery_mode), delivery_mode) or PERSISTENT
        headers = {**headers, "ignore_result": self.ignore_result}
        payload: str | bytes
        content_type, content_encoding, payload = dumps(body, serializer=serializer)
        if compression:
            payload, headers["compression"] = compress(payload, compression)
        encoded = encode(
            payload,
            headers=headers,
            properties=properties,
            content_type=content_type,
            content_encoding=content_encoding,
            exchange=exchange.name if isinstance(exchange, Exchange) else exchange or "",
            routing_key=routing_key or "",
            queues=self._names(name, declare),
        )
        self.captured.append((name, headers["id"], encoded))

    def _names(self, task: str, declare: Sequence[Any] | None) -> list[str]:
        """Return the names of queues. Each must be in Celery's settings, because the relay knows only the name."""
        names = []
        for queue in maybe_list(declare) or ():
            if not isinstance(queue, Queue) or not queue.name or self.app.amqp.queues[queue.name] != queue:
                raise InvalidMessage(
                    f"Task {task} declares {queue!r}, which is not in Celery's settings, so the relay cannot declare it.",
                    hint="Add the queue to task_queues of Celery's settings, and pass its name as queue=.",
                )
            names.append(queue.name)
        return names


UNSUPPORTED = {
    "producer": "the relay uses its own producer",
    "publisher": "the relay uses its own producer",
    "connection": "the relay uses its own connection",
}
"""Options of `apply_async` that the outbox does not support, each with the reason."""


def capture(signature: Signature[Any], producer: CapturingProducer, **options: Any) -> AsyncResult[Any] | GroupResult:
    """
    Capture the messages of a signature; return the result that `apply_async` would have returned.

    Raises:
        InvalidMessage: the signature, or one of its options, cannot be sent through the outbox.
    """
    require_supported(signature, options)
    if isinstance(signature, group | chunks):
        return _capture_group(signature.group() if isinstance(signature, chunks) else signature, producer, options)
    if isinstance(signature, Chain):
        return _capture_chain(signature, producer, options)
    return _capture_task(signature, producer, options)


def require_supported(signature: Signature[Any], options: Mapping[str, Any] | None = None) -> None:
    """
    Raise unless a signature can be sent through the outbox.

    Raises:
        InvalidMessage: the signature begins with a chord, or has an option that is not supported.
    """
    merged = {**signature.options, **(options or {})}
    if isinstance(signature, chord) or merged.get("chord") is not None:
        raise InvalidMessage(
            f"{signature} begins with a chord. Celery writes a chord into the result backend when it is sent, and a rollback "
            "would leave it there.",
            hint="Put a task before the chord, as in `chain(first.si(), chord(...))`; then a worker sends the chord.",
        )
    for name in UNSUPPORTED.keys() & merged.keys():
        raise InvalidMessage(f"Task {signature.task} has the option {name!r}, but {UNSUPPORTED[name]}.", hint="Leave it out.")


def _capture_task(signature: Signature[Any], producer: CapturingProducer, options: dict[str, Any]) -> AsyncResult[Any]:
    producer.ignore_result = _ignores_result(signature, {**signature.options, **options}, producer.app)
    result: AsyncResult[Any] = signature.apply_async(
        **{**options, "producer": producer, "add_to_parent": False, "ignore_result": True, "retry": False}
    )
    result.ignored = bool(producer.ignore_result)
    return result


def _ignores_result(signature: Signature[Any], options: dict[str, Any], app: Celery) -> bool | None:
    """Return the message's header `ignore_result`: the option, or the task's attribute if this process knows the task."""
    if "ignore_result" in options:
        return bool(options["ignore_result"])
    task = app.tasks.get(str(signature.task))
    return None if task is None else bool(task.ignore_result)


def _capture_chain(signature: Chain, producer: CapturingProducer, options: dict[str, Any]) -> AsyncResult[Any] | GroupResult:
    """Capture a chain's first task, which contains the other tasks, as Celery's `_chain.run` sends it."""
    options = {**signature.options, **options}
    link, link_error = options.pop("link", None), options.pop("link_error", None)
    names = ("root_id", "parent_id", "task_id", "group_id", "chord", "group_index")
    identity = {name: options.pop(name, None) for name in names}
    tasks, results = signature.prepare_steps(
        signature.args,
        {},
        list(signature.tasks),
        identity["root_id"],
        identity["parent_id"],
        link_error,
        producer.app,
        identity["task_id"],
        identity["group_id"],
        identity["chord"],
        group_index=identity["group_index"],
    )
    if not results:
        raise InvalidMessage("The chain has no tasks.", hint="Add a task to it.")
    if link:
        tasks[0].extend_list_option("link", link)
    first = tasks.pop()
    options["chain"] = [*(options.get("chain") or ()), *tasks]
    result = capture(first, producer, **options)
    return results[0] if tasks else result


def _capture_group(signature: group, producer: CapturingProducer, options: dict[str, Any]) -> GroupResult:
    options = {**signature.options, **options}
    for name in ("link", "link_error"):
        if options.pop(name, None):
            raise InvalidMessage(f"A group has the option {name!r}, which is not supported.", hint="Link each of its tasks.")
    group_id = options.pop("task_id", None) or uuid()
    options["group_id"] = group_id
    results = []
    for index, child in enumerate(_flatten(signature, producer.app)):
        clone = child.clone()
        result = clone.freeze(group_id=group_id, root_id=options.get("root_id"), group_index=index)
        capture(clone, producer, **options)
        results.append(result)
    if not results:
        raise InvalidMessage("The group has no tasks.", hint="Add a task to it.")
    # The barrier keeps GroupResult from the result backend, for which the transaction would have to wait.
    return GroupResult(group_id, results, app=producer.app, ready_barrier=barrier())


def _flatten(signature: group, app: Celery) -> Iterator[Signature[Any]]:
    for child in signature.tasks:
        part: Any = maybe_signature(child, app=app)
        if isinstance(part, group):
            yield from _flatten(part, app)
        elif not (isinstance(part, Chain) and not part.tasks):
            yield part
