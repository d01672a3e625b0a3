"""
Has Celery build the messages of a signature, whatever it is made of, without sending one.

A chain is one message, which carries the rest of it; a worker sends the next task. A group is a message for each of its tasks.
A chord is refused: Celery writes it into the result backend when it is sent, which no rollback takes back.

Celery gives its messages to a producer that keeps them instead of sending them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import msgspec
from celery import Celery
from celery.canvas import Signature, chord, chunks, group, maybe_signature
from celery.canvas import _chain as Chain  # the public `chain` is a function's name for it
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
    """The connection of a producer that has none."""

    def _reraise_as_library_errors(self) -> nullcontext[None]:  # Celery asks for it around a send
        return nullcontext()


class CapturingProducer(msgspec.Struct):
    """
    Keeps what is published; duck-typed, as Celery takes any producer.

    Args:
        ignore_result: that of the next message. Celery is told to ignore all of them, or it would turn to the
            result backend before the transaction has committed.
        captured: of each task its name, its id, and the body of its message row.
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
            kombu.exceptions.EncodeError: the serializer cannot write the arguments.
            InvalidMessage: the outbox cannot keep the message as it is.
        """
        if "task" not in headers:  # an event about the task
            return
        for name in ("retry", "retry_policy", "timeout", "confirm_timeout", "mandatory", "immediate"):
            properties.pop(name, None)  # the relay decides how it is sent
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
        """Return the names of queues; each must be one that the relay finds, or makes, by its name."""
        names = []
        for queue in maybe_list(declare) or ():
            if not isinstance(queue, Queue) or not queue.name or self.app.amqp.queues[queue.name] != queue:
                raise InvalidMessage(
                    f"Task {task} declares {queue!r}, which the relay does not know.",
                    hint="Put it into task_queues of Celery's settings, and name it by queue=.",
                )
            names.append(queue.name)
        return names


REFUSED = {
    "producer": "the relay has one of its own",
    "publisher": "the relay has one of its own",
    "connection": "the relay has one of its own",
}
"""Options of `apply_async` that the outbox cannot keep, each with the reason."""


def capture(signature: Signature[Any], producer: CapturingProducer, **options: Any) -> AsyncResult[Any] | GroupResult:
    """
    Capture the messages of a signature; return the result that `apply_async` would have returned.

    Raises:
        InvalidMessage: the signature, or an option of it, cannot go through the outbox.
    """
    refuse_unfit(signature, options)
    if isinstance(signature, group | chunks):
        return _capture_group(signature.group() if isinstance(signature, chunks) else signature, producer, options)
    if isinstance(signature, Chain):
        return _capture_chain(signature, producer, options)
    return _capture_task(signature, producer, options)


def refuse_unfit(signature: Signature[Any], options: Mapping[str, Any] | None = None) -> None:
    """
    Raise where a signature cannot go through the outbox.

    Raises:
        InvalidMessage: it begins with a chord, or has an option that cannot be kept.
    """
    merged = {**signature.options, **(options or {})}
    if isinstance(signature, chord) or merged.get("chord") is not None:
        raise InvalidMessage(
            f"{signature} begins with a chord: Celery writes it into the result backend when it is sent, and a rollback would "
            "leave it there.",
            hint="Put a task before it, as in `chain(first.si(), chord(...))`; a worker sends the chord then.",
        )
    for name in REFUSED.keys() & merged.keys():
        raise InvalidMessage(f"Task {signature.task} has the option {name!r}, and {REFUSED[name]}.", hint="Leave it out.")


def _capture_task(signature: Signature[Any], producer: CapturingProducer, options: dict[str, Any]) -> AsyncResult[Any]:
    producer.ignore_result = _ignores_result(signature, {**signature.options, **options}, producer.app)
    result: AsyncResult[Any] = signature.apply_async(
        **{**options, "producer": producer, "add_to_parent": False, "ignore_result": True, "retry": False}
    )
    result.ignored = bool(producer.ignore_result)
    return result


def _ignores_result(signature: Signature[Any], options: dict[str, Any], app: Celery) -> bool | None:
    """Return what the message says of its result: the option, else the task's own where this process knows the task."""
    if "ignore_result" in options:
        return bool(options["ignore_result"])
    task = app.tasks.get(str(signature.task))
    return None if task is None else bool(task.ignore_result)


def _capture_chain(signature: Chain, producer: CapturingProducer, options: dict[str, Any]) -> AsyncResult[Any] | GroupResult:
    """Capture a chain's first task with the others in it, as `_chain.run` sends it."""
    options = {**signature.options, **options}
    link, link_error = options.pop("link", None), options.pop("link_error", None)
    names = ("root_id", "parent_id", "task_id", "group_id", "chord", "group_index")
    taken = {name: options.pop(name, None) for name in names}
    tasks, results = signature.prepare_steps(
        signature.args,
        {},
        list(signature.tasks),
        taken["root_id"],
        taken["parent_id"],
        link_error,
        producer.app,
        taken["task_id"],
        taken["group_id"],
        taken["chord"],
        group_index=taken["group_index"],
    )
    if not results:
        raise InvalidMessage("The chain has no task.", hint="Put one into it.")
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
            raise InvalidMessage(f"A group has the option {name!r}.", hint="Link each of its tasks.")
    group_id = options.pop("task_id", None) or uuid()
    options["group_id"] = group_id
    results = []
    for index, child in enumerate(_flatten(signature, producer.app)):
        clone = child.clone()
        result = clone.freeze(group_id=group_id, root_id=options.get("root_id"), group_index=index)
        capture(clone, producer, **options)
        results.append(result)
    if not results:
        raise InvalidMessage("The group has no task.", hint="Put one into it.")
    # A barrier of its own keeps the result from the result backend, which the transaction need not wait for.
    return GroupResult(group_id, results, app=producer.app, ready_barrier=barrier())


def _flatten(signature: group, app: Celery) -> Iterator[Signature[Any]]:
    for child in signature.tasks:
        part: Any = maybe_signature(child, app=app)
        if isinstance(part, group):
            yield from _flatten(part, app)
        elif not (isinstance(part, Chain) and not part.tasks):
            yield part
