"""The code of docs/how-to/celery-tasks.md runs as it stands."""

from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from django.db import transaction
from django.http import JsonResponse

from outbox import conf
from outbox.celery.stored import TOPIC, decode
from outbox.testing import Outbox
from tests.outbox.celery.app import add
from tests.outbox.celery.conftest import stored
from tests.quotes import python_blocks

SETTINGS, TASK, VIEW, DJANGOS = python_blocks("how-to/celery-tasks.md")


@pytest.mark.django_db
class TestThePage:
    def test_sends_what_its_view_sends(self, settings: Any, shared_app: Celery):
        orders = SimpleNamespace(objects=SimpleNamespace(create=lambda: SimpleNamespace(pk=17)))
        names: dict[str, Any] = {"__name__": "shop.tasks", "Order": orders, "JsonResponse": JsonResponse, "INSTALLED_APPS": []}
        for block in (SETTINGS, TASK, VIEW):
            exec(block, names)  # noqa: S102
        settings.OUTBOX = names["OUTBOX"]

        names["place_order"](None)

        assert conf.topic_settings(TOPIC).broker == "celery"
        assert [task.queues for task in stored()] == [("celery",), ("mail",), ("celery",)]
        assert {task.task for task in stored()} == {"shop.tasks.send_receipt"}

    def test_has_the_fixture_stand_in_for_celerys_broker(self, outbox: Outbox):
        with transaction.atomic():
            add.delay_in_transaction(1, 2)

        assert outbox.run_until_idle().sent == 1
        [message] = outbox.published(TOPIC)
        assert decode(outbox.brokers["celery"].visible(TOPIC)[0].body).task == "tests.add"
        assert message is not None

    def test_names_the_backend_of_djangos_tasks(self):
        names: dict[str, Any] = {}
        exec(DJANGOS, names)  # noqa: S102

        assert names["TASKS"]["default"]["BACKEND"].startswith(names["CELERY_IMPORTS"][0])
