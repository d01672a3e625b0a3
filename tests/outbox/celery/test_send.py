"""What a task in a transaction becomes: the very message that Celery would have sent."""

import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from celery import Celery, chain, group, signals
from django.db import transaction
from kombu import Exchange, Queue
from kombu.exceptions import EncodeError

from outbox.celery import CeleryBroker, send_in_transaction
from outbox.errors import ConfigurationError, InvalidMessage, NotInTransaction
from outbox.message import Header, read_headers
from outbox.models import MessageRow
from tests.outbox.celery.app import add, far, limited, routed
from tests.outbox.celery.conftest import configured, stored, take, through_the_outbox

pytestmark = pytest.mark.django_db

IN_AN_HOUR = datetime(2100, 1, 1, tzinfo=UTC)

KEPT: dict[str, dict[str, Any]] = {
    "nothing": {},
    "task_id": {"task_id": "my-id"},
    "eta": {"eta": IN_AN_HOUR},
    "expires": {"expires": IN_AN_HOUR},
    "queue": {"queue": "routed"},
    "routing_key": {"queue": "routed", "routing_key": "routed.later"},
    "exchange": {"exchange": "routed", "routing_key": "routed.x"},
    "priority": {"priority": 7},
    "headers": {"headers": {"tenant": "a", "at": IN_AN_HOUR, "price": Decimal("1.20")}},
    "time limits": {"time_limit": 20, "soft_time_limit": 10},
    "link": {"link": add.si(1, 1), "link_error": [add.si(2, 2)]},
    "ignore_result": {"ignore_result": True},
    "shadow": {"shadow": "another name"},
    "parents": {"root_id": "root", "parent_id": "parent"},
    "serializer": {"serializer": "pickle"},
    "yaml": {"serializer": "yaml"},
    "compression": {"compression": "zlib"},
    "delivery_mode": {"delivery_mode": "transient"},
    "reply_to": {"reply_to": "me"},
    "retries": {"retries": 2},
    "stamps": {"stamped_headers": ["who"], "who": "me"},
    "no retry": {"retry": False, "retry_policy": {"max_retries": 1}},
}


def comparable(message: Any) -> dict[str, Any]:
    properties = {name: value for name, value in message.properties.items() if name not in ("delivery_tag", "expiration")}
    headers = {**message.headers}
    return {
        "headers": headers,
        "properties": properties,
        "body": message.body,
        "type": (message.content_type, message.content_encoding),
    }


def with_app(outbox: dict[str, Any], app: str) -> dict[str, Any]:
    """Return settings whose tasks go to another Celery app's server."""
    brokers = {**outbox["BROKERS"], "celery": {**outbox["BROKERS"]["celery"], "OPTIONS": {"APP": app}}}
    return {**outbox, "BROKERS": brokers}


class TestATask:
    @pytest.mark.parametrize("options", KEPT.values(), ids=KEPT)
    @pytest.mark.filterwarnings("ignore:.*")
    def test_is_the_message_that_apply_async_sends(self, app: Celery, broker: CeleryBroker, options: dict[str, Any]):
        options = {"task_id": "the-id", **options}
        queue = "routed" if {"queue", "exchange"} & options.keys() else "celery"
        add.apply_async((1, 2), {}, **options)
        [expected] = take(app, queue)

        with transaction.atomic():
            result = add.apply_in_transaction((1, 2), {}, **options)
        through_the_outbox(broker)

        [message] = take(app, queue)
        assert comparable(message) == comparable(expected)
        assert result.id == options["task_id"]

    @pytest.mark.parametrize("name", ["routed", "limited"])
    def test_has_the_route_and_the_options_of_its_type(self, app: Celery, broker: CeleryBroker, name: str):
        task, queue = (routed, "routed") if name == "routed" else (limited, "celery")
        task.apply_async(task_id="the-id")
        [expected] = take(app, queue)

        with transaction.atomic():
            task.apply_in_transaction(task_id="the-id")
        through_the_outbox(broker)

        [message] = take(app, queue)
        for one in (message, expected):
            one.headers.pop("expires")
        assert comparable(message) == comparable(expected)

    def test_may_be_one_that_only_workers_know(self, app: Celery, broker: CeleryBroker):
        with transaction.atomic():
            send_in_transaction(app.signature("elsewhere.task", args=(1,), queue="routed"))
        through_the_outbox(broker)

        [message] = take(app, "routed")
        assert message.headers["task"] == "elsewhere.task"

    def test_counts_its_times_from_the_call(self):
        began = datetime.now(UTC)

        with transaction.atomic():
            add.apply_in_transaction((1, 2), countdown=60, expires=120)

        [task] = stored()
        headers = task.read_headers()
        for name, seconds in (("eta", 60), ("expires", 120)):
            at = datetime.fromisoformat(headers[name])
            assert timedelta(seconds=seconds) <= at - began < timedelta(seconds=seconds + 5)

    def test_lives_at_the_broker_for_as_long_as_is_left_when_it_is_sent(self):
        with transaction.atomic():
            add.apply_in_transaction((1, 2), expires=120)

        [task] = stored()
        expires = task.read_headers()["expires"]
        now = datetime.now(UTC) + timedelta(seconds=100)
        assert 15_000 < int(task.read_properties(expires=expires, now=now)["expiration"]) <= 20_000
        later = now + timedelta(seconds=100)
        assert task.read_properties(expires=expires, now=later)["expiration"] == "0"

    def test_is_stored_with_its_name_its_id_and_readable_arguments(self):
        with transaction.atomic():
            result = add.delay_in_transaction(1, y=2)

        row = MessageRow.objects.get()
        assert read_headers(row.headers)[Header.TYPE] == "tests.add"
        assert row.key == result.id
        assert json.loads(bytes(row.body))["body"][:2] == [[1], {"y": 2}]

    def test_is_dropped_with_a_rollback(self):
        with transaction.atomic():
            add.delay_in_transaction(1, 2)
            transaction.set_rollback(True)

        assert stored() == []

    def test_needs_a_transaction(self):
        with pytest.raises(NotInTransaction, match=r"Task tests\.add was published outside a transaction"):
            add.delay_in_transaction(1, 2)

    def test_raises_what_its_serializer_raises(self):
        with transaction.atomic(), pytest.raises(EncodeError):
            add.delay_in_transaction(object(), 2)

        assert stored() == []

    def test_checks_its_arguments_as_a_call_does(self):
        with transaction.atomic(), pytest.raises(TypeError):
            add.delay_in_transaction(1)

    @pytest.mark.parametrize(
        "options",
        [
            {"producer": object()},
            {"connection": object()},
            {"queue": Queue("own", Exchange("other", type="topic"), "own")},
            {"routing_key": "x" * 256, "queue": "routed"},
            {"headers": {"who": object()}},
            {"headers": {"larger than a frame": "x" * 100_000}},
            {"chord": add.s()},
        ],
        ids=lambda options: next(iter(options)),
    )
    def test_refuses_what_cannot_be_kept(self, options: dict[str, Any]):
        with transaction.atomic(), pytest.raises(InvalidMessage):
            add.apply_in_transaction((1, 2), **options)

        assert stored() == []

    def test_has_what_receivers_of_before_task_publish_add(self, app: Celery, broker: CeleryBroker):
        def tag(headers: dict[str, Any], **_: object) -> None:
            headers["request"] = "r-1"

        signals.before_task_publish.connect(tag)
        try:
            with transaction.atomic():
                add.delay_in_transaction(1, 2)
        finally:
            signals.before_task_publish.disconnect(tag)
        through_the_outbox(broker)

        [message] = take(app)
        assert message.headers["request"] == "r-1"

    @pytest.mark.django_db(transaction=True)
    def test_names_the_running_task_as_its_parent_and_is_its_child_after_the_commit(self, app: Celery):
        children: list[list[str]] = []

        @app.task(name="tests.caller", bind=True, shared=False)
        def caller(self) -> None:
            with transaction.atomic():
                add.delay_in_transaction(1, 2)
                transaction.set_rollback(True)
            with transaction.atomic():
                sent = add.delay_in_transaction(1, 2)
                children.append([one.id for one in self.request.children])
            children.extend([[one.id for one in self.request.children], [sent.id]])

        caller.apply(task_id="caller-id").get()

        [task] = stored()
        assert (task.read_headers()["root_id"], task.read_headers()["parent_id"]) == ("caller-id", "caller-id")
        assert children == [[], [task.id], [task.id]]

    @pytest.mark.parametrize(
        "signature",
        [far.s(1), far.s(1).set(countdown=5), chain(far.s(1), far.si(2)), group(far.s(1), far.s(2)), far.chunks([(1,), (2,)], 1)],
        ids=["task", "countdown", "chain", "group", "chunks"],
    )
    def test_reaches_neither_celerys_broker_nor_its_result_backend(self, settings: Any, signature: Any):
        settings.OUTBOX = with_app(settings.OUTBOX, "tests.outbox.celery.app.away")

        with transaction.atomic():
            result = send_in_transaction(signature)

        assert stored()
        assert result.id

    def test_of_another_app_is_refused_before_it_goes_to_the_wrong_server(self):
        with transaction.atomic(), pytest.raises(ConfigurationError) as refused:
            send_in_transaction(far.s(1))

        assert "Task tests.far belongs to the Celery app 'outbox-tests-away'" in str(refused.value)
        assert "broker 'celery' sends to the server of 'outbox-tests'" in str(refused.value)
        assert stored() == []

    def test_needs_a_celery_broker_in_the_settings(self, settings: Any):
        settings.OUTBOX = {}

        with transaction.atomic(), pytest.raises(ConfigurationError, match=r"outbox\.celery\.CeleryBroker"):
            add.delay_in_transaction(1, 2)

    def test_needs_celerys_second_protocol(self, app: Celery):
        with configured(app, task_protocol=1), transaction.atomic(), pytest.raises(ConfigurationError, match="protocol 2"):
            add.delay_in_transaction(1, 2)
