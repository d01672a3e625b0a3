"""Django's own tasks through the outbox. Collected with Django 6.0 or later."""

from datetime import UTC, datetime
from typing import Any

import pytest
from celery import Celery
from django.db import transaction
from django.tasks import TaskResultStatus
from django.tasks.exceptions import InvalidTask
from django.tasks.signals import task_enqueued, task_finished

from outbox.celery.django_tasks import run
from outbox.errors import NotInTransaction
from tests.outbox.celery.app import app as tests_app
from tests.outbox.celery.conftest import outgoing, stored, take

pytestmark = pytest.mark.django_db

BACKEND = "outbox.celery.django_tasks.OutboxBackend"
IN_A_CENTURY = datetime(2100, 1, 1, tzinfo=UTC)


@pytest.fixture(autouse=True)
def tasks(settings: Any, shared_app: Celery) -> Any:
    settings.TASKS = {"default": {"BACKEND": BACKEND, "QUEUES": ["default", "routed"]}}
    from tests.outbox.celery import djangos

    djangos.calls.clear()
    return djangos


def worked(app: Celery, queue: str = "celery") -> list[Any]:
    """Run what is in a queue as a worker does; return what came of each."""
    found = []
    for message in take(app, queue):
        args, kwargs, _ = message.payload
        found.append(app.tasks[message.headers["task"]].apply(args, kwargs, task_id=message.headers["id"]))
    return found


class TestEnqueue:
    def test_sends_when_the_transaction_commits(
        self, app: Celery, broker: Any, tasks: Any, django_capture_on_commit_callbacks: Any
    ):
        enqueued = []
        listen = lambda task_result, **_: enqueued.append(task_result)  # noqa: E731
        task_enqueued.connect(listen)

        with django_capture_on_commit_callbacks(execute=True), transaction.atomic():
            result = tasks.count.enqueue(4)
            before = list(enqueued)
        broker.send(outgoing())

        [done] = worked(app)
        assert (done.id, done.result) == (result.id, 5)
        assert tasks.calls == [4]
        assert before == []
        assert [one.id for one in enqueued] == [result.id]
        assert result.status is TaskResultStatus.READY

    def test_is_dropped_with_a_rollback(self, tasks: Any):
        with transaction.atomic():
            tasks.count.enqueue(4)
            transaction.set_rollback(True)

        assert stored() == []

    def test_needs_a_transaction(self, tasks: Any):
        with pytest.raises(NotInTransaction, match=r"djangos\.count"):
            tasks.count.enqueue(4)

    def test_raises_where_arguments_are_no_json(self, tasks: Any):
        with transaction.atomic(), pytest.raises(TypeError):
            tasks.count.enqueue(object())

        assert stored() == []

    def test_keeps_queue_and_time(self, app: Celery, tasks: Any):
        with transaction.atomic():
            tasks.count.using(queue_name="routed", run_after=IN_A_CENTURY).enqueue(4)

        [task] = stored()
        assert task.queues == ("routed",)
        assert task.read_headers()["eta"] == IN_A_CENTURY.isoformat()
        assert task.read_headers()["shadow"] == "tests.outbox.celery.djangos.count"

    @pytest.mark.parametrize("options", [{"priority": 5}, {"queue_name": "elsewhere"}], ids=str)
    def test_refuses_what_it_does_not_offer(self, tasks: Any, options: dict[str, Any]):
        with pytest.raises(InvalidTask):
            tasks.count.using(**options)

    def test_cannot_read_results(self, tasks: Any):
        with pytest.raises(NotImplementedError):
            tasks.count.get_result("one")


class TestRun:
    def test_gives_the_context_and_awaits_coroutines(self, app: Celery, broker: Any, tasks: Any):
        with transaction.atomic():
            result = tasks.tell.enqueue()
            tasks.later.enqueue(21)
        broker.send(outgoing())

        done = worked(app)

        assert tasks.calls == [(result.id, 1)]
        assert done[1].result == 42

    def test_fails_as_the_task_does(self, app: Celery, broker: Any, tasks: Any):
        finished = []
        listen = lambda task_result, **_: finished.append(task_result)  # noqa: E731
        task_finished.connect(listen)
        with transaction.atomic():
            tasks.fail.enqueue()
        broker.send(outgoing())

        [done] = worked(app)

        assert isinstance(done.result, LookupError)
        [result] = finished
        assert result.status is TaskResultStatus.FAILED
        assert result.errors[0].exception_class is LookupError

    def test_is_known_to_workers_that_import_the_backend(self):
        assert run.name in tests_app.tasks
