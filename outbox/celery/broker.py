"""The broker that sends Celery's tasks: one topic, one phase, and nobody receives here."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from typing import Any, ClassVar

import msgspec

from outbox.brokers.base import Broker, Limits, Outgoing, SendResult, SendStatus, TopicSpec
from outbox.brokers.options import problems_with, read_options
from outbox.brokers.validation import validate
from outbox.celery.confirms import ConfirmingProducer, Refusal
from outbox.celery.direct import DirectProducer
from outbox.celery.errors import not_connected
from outbox.celery.link import OUT_OF_TIME, has_confirms, open_connection
from outbox.celery.options import CeleryOptions, find_app
from outbox.celery.stored import TOPIC, TaskMessage, decode
from outbox.errors import BrokerUnavailable, ConfigurationError
from outbox.findings import Finding, risky_option, wrong_option
from outbox.message import TopicType

NO_ANSWER = (SendStatus.UNAVAILABLE, SendStatus.UNSURE)

CONNECT_TIMEOUT = timedelta(seconds=4)  # Celery's default, broker_connection_timeout


class CeleryBroker(Broker):
    """Sends tasks to the broker of a Celery app. OPTIONS: `outbox.celery.options.CeleryOptions`."""

    system: ClassVar[str] = "celery"
    reserved_topics: ClassVar[tuple[str, ...]] = (TOPIC,)

    def __init__(self, alias: str, options: Mapping[str, Any], topics: Sequence[TopicSpec]) -> None:
        super().__init__(alias, options, topics)
        self._settings = read_options(CeleryOptions, options)
        self._app = find_app(self._settings)
        self._producer: ConfirmingProducer | DirectProducer | None = None
        self._sending = threading.Lock()
        self._is_closed = False

    @classmethod
    def check_settings(cls, options: Mapping[str, Any], topics: Sequence[TopicSpec] = ()) -> list[Finding]:
        """Return wrong options, else what in Celery's settings does not go with the outbox, else other topics than its own."""
        if problems := problems_with(CeleryOptions, options):
            return problems
        settings = read_options(CeleryOptions, options)
        try:
            app = find_app(settings)
        except ConfigurationError as error:
            return [wrong_option(error.message, error.hint)]
        return list(_problems_of(app)) or [
            wrong_option(f"Topic {topic.name!r} cannot go there: tasks only are sent.", "Give the topic another BROKER.")
            for topic in topics
            if topic.name not in cls.reserved_topics or topic.type is not TopicType.NORMAL
        ]

    @classmethod
    def limits(cls, options: Mapping[str, Any], topic: TopicSpec) -> Limits:
        """Return how long a batch may take: a connection, and its confirms."""
        return Limits(send=CONNECT_TIMEOUT + read_options(CeleryOptions, options).timeout)

    def check(self) -> list[Finding]:
        """Return what is wrong with the options; connect to Celery's broker."""
        if problems := self.check_settings(self.options):
            return problems
        try:
            open_connection(self._app, self._settings.timeout).release()
        except Exception as error:  # whatever a transport raises
            raise BrokerUnavailable(not_connected(error).reason) from error
        return []

    def send(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        """Publish tasks, and wait until the server has them."""
        results: dict[int, SendResult] = {}
        tasks = []
        for number, message in enumerate(messages):
            read = self._read(number, message)
            if isinstance(read, TaskMessage):
                tasks.append(read)
            else:
                results[number] = read
        with self._sending:
            results |= self._publish(tasks)
        return [results[number] for number in range(len(messages))]

    def close(self) -> None:
        """Close the connection. A send under way ends early."""
        self._is_closed = True
        with self._sending:
            self._drop()

    def _read(self, number: int, message: Outgoing) -> TaskMessage | SendResult:
        if rejection := validate(message, self.topics, is_half=False, max_body_bytes=self.max_body_bytes):
            return rejection
        try:
            return TaskMessage(number, message.message_id, decode(message.body))
        except msgspec.MsgspecError as error:
            reason = f"This is not a task: {error}. Send tasks by outbox.celery.send_in_transaction()."
            return SendResult(SendStatus.REFUSED, reason=reason)

    def _publish(self, tasks: Sequence[TaskMessage]) -> dict[int, SendResult]:
        if not tasks:
            return {}
        deadline = monotonic() + self._settings.timeout.total_seconds()
        results, closed = self._call(tasks, deadline)
        while closed is not None:
            alone = self._find_refused(closed, results, deadline)
            rest = [task for task in tasks if results[task.number].status in NO_ANSWER and task.number not in alone]
            results |= alone
            again, closed = self._call(rest, deadline)
            results |= _still_unsure(results, again)
        return results

    def _find_refused(self, first: Refusal, before: Mapping[int, SendResult], deadline: float) -> dict[int, SendResult]:
        """
        Send each task alone of which one made the server close the connection; return the results.

        Where the server closes the connection again, the task is MISCONFIGURED, and so are others of a queue that it declared.
        """
        results: dict[int, SendResult] = {}
        for task in first.possible_poison:
            result, closed = self._call([task], deadline)
            if closed is None:
                results |= _still_unsure(before, result)
            elif closed.queue is not None and closed.queue == first.queue:
                return results | {task.number: closed.result for task in first.possible_poison if task.number not in results}
            else:
                results[task.number] = closed.result
        return results

    def _call(self, tasks: Sequence[TaskMessage], deadline: float) -> tuple[dict[int, SendResult], Refusal | None]:
        """Publish over the connection, or a new one; return the results, and why the server closed it, if because of a task."""
        if not tasks or self._is_closed or monotonic() >= deadline:
            return {task.number: OUT_OF_TIME for task in tasks}, None
        try:
            producer = self._connected()
        except Exception as error:  # whatever a transport raises
            self._drop()
            result = not_connected(error)
            return {task.number: result for task in tasks}, None
        try:
            results = {task.number: result for task, result in producer.publish(tasks, deadline)}
        except BaseException:  # a confirm that is still to come would be taken for another's
            self._drop()
            raise
        if producer.is_broken:
            self._drop()
        return results, producer.refusal

    def _connected(self) -> ConfirmingProducer | DirectProducer:
        if self._producer is not None and not self._producer.is_alive():
            self._drop()
        if self._producer is None:
            connection = open_connection(self._app, self._settings.timeout)
            kind = ConfirmingProducer if has_confirms(connection) else DirectProducer
            self._producer = kind(self._app, connection, lambda: self._is_closed)
        return self._producer

    def _drop(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            with suppress(Exception):  # it may be broken in any way
                producer.close()


def _still_unsure(before: Mapping[int, SendResult], after: Mapping[int, SendResult]) -> dict[int, SendResult]:
    """Return the results of a second try. A message that was not handed over again may be stored since the first."""
    return {
        number: before[number]
        if result.status is SendStatus.UNAVAILABLE and before[number].status is SendStatus.UNSURE
        else result
        for number, result in after.items()
    }


def _problems_of(app: Any) -> list[Finding]:
    problems = []
    if app.conf.task_protocol != 2:
        text = f"Celery's task_protocol is {app.conf.task_protocol}, and the outbox sends protocol 2 only."
        problems.append(wrong_option(text, "Leave task_protocol out."))
    if app.main == "default" and not app.conf.broker_url:
        problems.append(
            wrong_option("There is no Celery app here.", 'Import it in the project\'s __init__.py, or name it: OPTIONS["APP"].')
        )
    if app.conf.task_default_delivery_mode == "transient":
        text = "Celery's task_default_delivery_mode is transient: a restart of the broker loses tasks that were sent."
        problems.append(risky_option(text, 'Set it to "persistent".'))
    return problems
