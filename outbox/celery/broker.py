"""The broker that sends Celery's tasks. It has one topic, sends in one phase, and receives nothing: Celery workers do."""

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
        """Return problems of OPTIONS, otherwise those of Celery's settings, otherwise those of topics that are not for tasks."""
        if problems := problems_with(CeleryOptions, options):
            return problems
        settings = read_options(CeleryOptions, options)
        try:
            app = find_app(settings)
        except ConfigurationError as error:
            return [wrong_option(error.message, error.hint)]
        return list(_problems_of(app)) or [
            wrong_option(
                f"Topic {topic.name!r} cannot use this broker, which sends only tasks.", "Give the topic another BROKER."
            )
            for topic in topics
            if topic.name not in cls.reserved_topics or topic.type is not TopicType.NORMAL
        ]

    @classmethod
    def limits(cls, options: Mapping[str, Any], topic: TopicSpec) -> Limits:
        """Return how long the send of a batch may take: connecting, and waiting for the confirms."""
        return Limits(send=CONNECT_TIMEOUT + read_options(CeleryOptions, options).timeout)

    def check(self) -> list[Finding]:
        """Return problems of OPTIONS; if there are none, connect to Celery's broker, and raise if that fails."""
        if problems := self.check_settings(self.options):
            return problems
        try:
            open_connection(self._app, self._settings.timeout).release()
        except Exception as error:  # transports raise errors of many types
            raise BrokerUnavailable(not_connected(error).reason) from error
        return []

    def send(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        """Publish tasks, and wait until the server confirms that it has stored them."""
        results: dict[int, SendResult] = {}
        tasks = []
        for number, message in enumerate(messages):
            task = self._read(number, message)
            if isinstance(task, TaskMessage):
                tasks.append(task)
            else:
                results[number] = task
        with self._sending:
            results |= self._publish(tasks)
        return [results[number] for number in range(len(messages))]

    def close(self) -> None:
        """Close the connection. A send in progress in another thread ends early."""
        self._is_closed = True
        with self._sending:
            self._drop()

    def _read(self, number: int, message: Outgoing) -> TaskMessage | SendResult:
        if rejection := validate(message, self.topics, is_half=False, max_body_bytes=self.max_body_bytes):
            return rejection
        try:
            return TaskMessage(number, message.message_id, decode(message.body))
        except msgspec.MsgspecError as error:
            reason = f"This is not a task: {error}. Send tasks with outbox.celery.send_in_transaction()."
            return SendResult(SendStatus.REFUSED, reason=reason)

    def _publish(self, tasks: Sequence[TaskMessage]) -> dict[int, SendResult]:
        """Publish tasks. If one makes the server close the connection, each possible cause is sent alone, and then the others."""
        if not tasks:
            return {}
        deadline = monotonic() + self._settings.timeout.total_seconds()
        results, refusal = self._call(tasks, deadline)
        while refusal is not None:
            single_results = self._send_alone(refusal, results, deadline)
            remaining = [task for task in tasks if results[task.number].status in NO_ANSWER and task.number not in single_results]
            results |= single_results
            new_results, refusal = self._call(remaining, deadline)
            results |= _keep_unsure(results, new_results)
        return results

    def _send_alone(self, first: Refusal, before: Mapping[int, SendResult], deadline: float) -> dict[int, SendResult]:
        """
        Send each task alone that may have made the server close the connection; return the results.

        If the server closes the connection again, the task is MISCONFIGURED. If the declaration of a queue makes the server close
        it both times, all remaining tasks of that queue are MISCONFIGURED, too.
        """
        results: dict[int, SendResult] = {}
        for task in first.possible_poison:
            result, refusal = self._call([task], deadline)
            if refusal is None:
                results |= _keep_unsure(before, result)
            elif refusal.queue is not None and refusal.queue == first.queue:
                return results | {task.number: refusal.result for task in first.possible_poison if task.number not in results}
            else:
                results[task.number] = refusal.result
        return results

    def _call(self, tasks: Sequence[TaskMessage], deadline: float) -> tuple[dict[int, SendResult], Refusal | None]:
        """Publish on the connection, or on a new one; return the results, and the refusal if a task made the server close it."""
        if not tasks or self._is_closed or monotonic() >= deadline:
            return {task.number: OUT_OF_TIME for task in tasks}, None
        try:
            producer = self._connect()
        except Exception as error:  # transports raise errors of many types
            self._drop()
            result = not_connected(error)
            return {task.number: result for task in tasks}, None
        try:
            results = {task.number: result for task, result in producer.publish(tasks, deadline)}
        except BaseException:  # a late confirm would be taken for that of another message
            self._drop()
            raise
        if producer.is_broken:
            self._drop()
        return results, producer.refusal

    def _connect(self) -> ConfirmingProducer | DirectProducer:
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
            with suppress(Exception):  # a broken connection may raise any error
                producer.close()


def _keep_unsure(before: Mapping[int, SendResult], after: Mapping[int, SendResult]) -> dict[int, SendResult]:
    """
    Return the results of a second try.

    A message that was UNSURE before, and was not sent in the second try, stays UNSURE: the first try may have stored it.
    """
    return {
        number: before[number]
        if result.status is SendStatus.UNAVAILABLE and before[number].status is SendStatus.UNSURE
        else result
        for number, result in after.items()
    }


def _problems_of(app: Any) -> list[Finding]:
    problems = []
    if app.conf.task_protocol != 2:
        text = f"Celery's task_protocol is {app.conf.task_protocol}, but the outbox sends protocol 2 only."
        problems.append(wrong_option(text, "Remove task_protocol from Celery's settings."))
    if app.main == "default" and not app.conf.broker_url:
        problems.append(
            wrong_option(
                "No Celery app is imported.", 'Import the app in the project\'s __init__.py, or name it in OPTIONS["APP"].'
            )
        )
    if app.conf.task_default_delivery_mode == "transient":
        text = "Celery's task_default_delivery_mode is transient, so a restart of Celery's broker loses tasks that were sent."
        problems.append(risky_option(text, 'Set it to "persistent".'))
    return problems
