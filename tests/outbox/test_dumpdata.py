"""Django's `dumpdata` and `loaddata` with the outbox's tables."""

from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db.models import Model

from outbox import RetryPolicy, atomic, consumer, publish
from outbox.consuming import register
from outbox.consuming.worker import Worker
from outbox.database import outbox_apps
from outbox.models import Batch, MessageState, Topic
from outbox.relay.hosts import NO_IDLE_TIMEOUT, RelayTarget, run_once
from outbox.topics import write_topics
from tests.outbox.publishing.rows import OrderMade

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

APPS = [config.label for config in outbox_apps()]


@pytest.fixture(autouse=True)
def _outbox(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    embedded = {"BACKEND": "outbox.embedded.EmbeddedBroker"}
    settings.OUTBOX = {"BROKERS": {"default": embedded}, "TOPICS": {"made": {}}, "CELERY_WAKEUP": False}
    monkeypatch.setattr(register, "registered", {})


@pytest.fixture
def empty() -> Iterator[str]:
    """A migrated database without topics."""
    Topic.objects.using("other").all().delete()
    yield "other"
    Topic.objects.using("other").all().delete()
    write_topics("other")


def relay(alias: str) -> int:
    return run_once(RelayTarget(alias, "default"), note="test", at_most=timedelta(seconds=10), idle_timeout=NO_IDLE_TIMEOUT).sent


def publish_in(alias: str, number: int, **options: Any) -> None:
    with atomic(alias):
        publish(OrderMade(order_id=number), using=alias, **options)


def rows(alias: str) -> dict[type[Model], int]:
    models = [model for config in outbox_apps() for model in config.get_models() if not model._meta.proxy]
    return {model: model._base_manager.using(alias).count() for model in models}


class TestDumpdata:
    def test_is_loaded_into_another_database_which_goes_on(self, empty: str, tmp_path: Path):
        @consumer(OrderMade, group="points", retry=RetryPolicy(limit=0))
        def give_points(message, context):
            if message.order_id == 2:
                raise ValueError("no such customer")

        for number in (1, 2):
            publish_in("default", number, idempotency_key=str(number))
        relay("default")
        with closing(Worker(register.group("points"), "default")) as worker:
            worker.run(until_idle=True)
        publish_in("default", 3)
        publish_in("default", 4, delay=timedelta(days=1))
        file = str(tmp_path / "all.json")

        call_command("dumpdata", *APPS, output=file)
        call_command("loaddata", file, database=empty, verbosity=0)

        assert rows(empty) == rows("default")
        assert rows(empty)[MessageState] == 4
        publish_in(empty, 5)
        assert relay(empty) == 2
        assert Batch.objects.using(empty).count() == Batch.objects.using("default").count() + 1
