"""Tasks in a transaction where Celery runs them eagerly."""

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, chord
from django.db import transaction
from kombu.exceptions import EncodeError

from outbox.celery import send_in_transaction
from outbox.errors import InvalidMessage, NotInTransaction
from tests.outbox.celery.app import add
from tests.outbox.celery.conftest import configured, stored

pytestmark = pytest.mark.django_db


class TestEagerly:
    @pytest.fixture(autouse=True)
    def eager(self, app: Celery) -> Iterator[None]:
        with configured(app, task_always_eager=True, task_eager_propagates=True):
            yield

    def test_runs_when_the_transaction_commits_and_stores_nothing(self, app: Celery, django_capture_on_commit_callbacks: Any):
        ran: list[tuple[int, str]] = []

        @app.task(name="tests.eager", bind=True, shared=False)
        def eager(self, number: int) -> None:
            ran.append((number, self.request.id))

        with django_capture_on_commit_callbacks(execute=True), transaction.atomic():
            result = eager.delay_in_transaction(4)
            before = list(ran)

        assert before == []
        assert ran == [(4, result.id)]
        assert stored() == []

    def test_needs_a_transaction_too(self):
        with pytest.raises(NotInTransaction):
            add.delay_in_transaction(1, 2)

    def test_raises_what_its_serializer_raises(self):
        with transaction.atomic(), pytest.raises(EncodeError):
            add.delay_in_transaction(object(), 2)

    def test_refuses_what_cannot_be_kept(self):
        with transaction.atomic(), pytest.raises(InvalidMessage):
            send_in_transaction(chord([add.s(1, 1)], add.s()))
