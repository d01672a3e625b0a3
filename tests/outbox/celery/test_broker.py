"""The Celery broker: what it takes, what it refuses to do, and the topic that comes with it."""

from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from django.core.management import CommandError, call_command
from django.db import transaction

from outbox import conf
from outbox.brokers.base import Outgoing, SendStatus
from outbox.brokers.capabilities import Receives
from outbox.celery import CeleryBroker
from outbox.celery.stored import TOPIC
from outbox.consuming.register import consumer, group
from outbox.errors import BrokerUnavailable, ConfigurationError
from outbox.message import TopicSpec, TopicType
from outbox.models import MessageRow
from outbox.monitoring import doctor
from tests.outbox.celery.app import add
from tests.outbox.celery.conftest import OPTIONS, broker_at, configured, numbers, statuses, task

ACCEPTED, REFUSED, MISCONFIGURED = SendStatus.ACCEPTED, SendStatus.REFUSED, SendStatus.MISCONFIGURED
AWAY = "redis://127.0.0.1:1/0"
A_MOMENT = timedelta(seconds=1)


class OwnBroker(CeleryBroker):
    """What a project makes of it."""


class TestSend:
    def test_refuses_what_is_no_task_and_takes_its_neighbours(self, broker: CeleryBroker, app: Celery):
        stray = Outgoing("stray", TOPIC, b'{"number": 1}')

        results = broker.send([task(1), stray, task(2)])

        assert statuses(results) == [ACCEPTED, REFUSED, ACCEPTED]
        assert "send_in_transaction" in results[1].reason
        assert numbers(app) == [1, 2]

    def test_refuses_a_body_that_is_empty_or_too_large(self, broker: CeleryBroker):
        bodies = [b"", b"x" * (broker.max_body_bytes + 1)]

        assert statuses(broker.send([Outgoing("one", TOPIC, body) for body in bodies])) == [REFUSED] * 2

    def test_is_unavailable_after_close(self, broker: CeleryBroker):
        broker.send([task(1)])

        broker.close()
        broker.close()

        assert statuses(broker.send([task(2)])) == [SendStatus.UNAVAILABLE]

    def test_leaves_for_later_what_the_time_does_not_suffice_for(self, app: Celery):
        with broker_at("memory://", TIMEOUT=timedelta(microseconds=1)) as broker:
            results = broker.send([task(1), task(2)])

        assert results[1].status is SendStatus.UNAVAILABLE
        assert "before this task was sent" in results[1].reason


class TestConsumers:
    @pytest.mark.usefixtures("no_consumers")
    def test_cannot_have_its_topic(self):
        @consumer(topic=TOPIC, group="astray")
        def handler(message: Any, context: Any) -> None: ...

        with pytest.raises(ConfigurationError, match="only sends"):
            group("astray").topics_of("celery")

    @pytest.mark.django_db
    def test_cannot_be_a_recorder(self):
        with pytest.raises(CommandError, match="only sends"):
            call_command("outbox_record", "--broker", "celery")


class TestTheTopic:
    def test_is_there_with_the_broker(self):
        assert conf.topic_settings(TOPIC).broker == "celery"
        assert conf.topics_of("celery") == [TopicSpec(TOPIC, TopicType.NORMAL)]

    def test_is_there_with_a_broker_of_the_projects_own(self, settings: Any):
        settings.OUTBOX = {"BROKERS": {"tasks": {"BACKEND": f"{__name__}.OwnBroker", "OPTIONS": OPTIONS}}}

        assert conf.topic_settings(TOPIC).broker == "tasks"

    def test_is_not_there_without_one(self, settings: Any):
        settings.OUTBOX = {"TOPICS": {"orders": {}}}

        assert TOPIC not in conf.settings().topics

    def test_may_be_set_up_like_any_other(self, settings: Any):
        settings.OUTBOX = {**settings.OUTBOX, "TOPICS": {TOPIC: {"BROKER": "celery", "RETENTION": timedelta(days=1)}}}

        assert conf.topic_settings(TOPIC).retention == timedelta(days=1)

    def test_cannot_be_anothers(self, settings: Any):
        settings.OUTBOX = {**settings.OUTBOX, "TOPICS": {TOPIC: {"BROKER": "default"}}}

        with pytest.raises(ConfigurationError, match="reserved for the broker 'celery'"):
            conf.settings()

    def test_cannot_have_two_brokers(self, settings: Any):
        brokers = {alias: {"BACKEND": "outbox.celery.CeleryBroker", "OPTIONS": OPTIONS} for alias in ("one", "two")}
        settings.OUTBOX = {"BROKERS": brokers}

        with pytest.raises(ConfigurationError, match="reserved for the broker 'two', but OUTBOX assigns it to 'one'"):
            conf.settings()

    def test_leaves_a_backend_that_cannot_be_imported_to_the_checks(self, settings: Any):
        settings.OUTBOX = {"BROKERS": {"one": {"BACKEND": "no.such.Broker"}}}

        assert conf.settings().topics == {}


class TestCheck:
    def test_finds_an_app_that_is_not_there(self):
        for app in ("tests.nowhere.app", "tests.outbox.celery.app.add"):
            [problem] = CeleryBroker.check_settings({"APP": app})
            assert app in problem.text

    def test_finds_a_wrong_option(self):
        assert "TIMEOUT" in CeleryBroker.check_settings({**OPTIONS, "TIMEOUT": timedelta()})[0].text
        assert "QUEUE" in CeleryBroker.check_settings({**OPTIONS, "QUEUE": "x"})[0].text.upper()

    def test_finds_the_first_protocol(self, app: Celery):
        with configured(app, task_protocol=1):
            [problem] = CeleryBroker.check_settings(OPTIONS)

        assert "protocol 2 only" in problem.text

    def test_warns_of_tasks_that_no_restart_survives(self, app: Celery):
        with configured(app, task_default_delivery_mode="transient"):
            [problem] = CeleryBroker.check_settings(OPTIONS)

        assert not problem.is_serious()

    def test_finds_a_topic_of_others(self):
        topics = [TopicSpec(TOPIC, TopicType.NORMAL), TopicSpec("orders", TopicType.NORMAL)]

        [problem] = CeleryBroker.check_settings(OPTIONS, topics)

        assert "'orders'" in problem.text

    def test_says_that_the_server_is_away(self):
        with broker_at(AWAY) as broker, pytest.raises(BrokerUnavailable):
            broker.check()

    @pytest.mark.django_db(transaction=True)  # the embedded broker stores its topics by a connection of its own
    def test_lets_the_doctor_name_it(self, app: Celery):
        found = [finding for finding in doctor.check_brokers() if "celery" in finding.obj]

        assert [finding.level_name for finding in found] == ["ok"]

    def test_knows_how_long_a_send_may_take(self):
        limits = CeleryBroker.limits({"TIMEOUT": timedelta(seconds=7)}, TopicSpec(TOPIC, TopicType.NORMAL))

        assert limits.send == timedelta(seconds=11)


@pytest.mark.django_db
class TestTheAdmin:
    def test_shows_a_task_with_its_name_and_its_arguments(self, admin_client: Any):
        with transaction.atomic():
            add.delay_in_transaction(17, y=23)
        row = MessageRow.objects.get()

        page = admin_client.get(f"/admin/outbox/messagerow/{row.pk}/change/").content.decode()

        assert "tests.add" in page
        assert "23" in page[page.index("&quot;body&quot;: [") :][:200]
        assert "No module defines" not in page


def test_has_no_consumers():
    assert not Receives.has(CeleryBroker)
