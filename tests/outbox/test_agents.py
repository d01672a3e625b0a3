"""Agents that wrap psycopg and comment each statement, as those of OpenTelemetry, Datadog and Google's sqlcommenter do."""

from contextlib import closing
from datetime import timedelta
from io import StringIO
from typing import Any

import psycopg
import pytest
from django.core.management import call_command
from psycopg import sql

from outbox import atomic, consumer, database, publish, publish_many
from outbox.consuming import register
from outbox.consuming.worker import Worker
from outbox.monitoring.find import find, parse
from outbox.relay.hosts import NO_IDLE_TIMEOUT, RelayTarget, run_once
from outbox.relay.maintenance import maintain
from tests.outbox.publishing.rows import OrderMade

pytestmark = pytest.mark.django_db(transaction=True)

COMMENT = " /*db_driver='psycopg%%3A3',traceparent='00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01'*/"


@pytest.fixture
def commented(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Comment each statement, and return the statements."""
    seen: list[str] = []
    execute = psycopg.Cursor.execute

    def comment(cursor: psycopg.Cursor[Any], query: Any, params: Any = None, **options: Any) -> psycopg.Cursor[Any]:
        text = query.as_string(cursor) if isinstance(query, sql.Composable) else query
        seen.append(text)
        return execute(cursor, text.rstrip().rstrip(";") + (COMMENT if params else COMMENT.replace("%%", "%")), params, **options)

    monkeypatch.setattr(psycopg.Cursor, "execute", comment)
    return seen


@pytest.fixture(autouse=True)
def _outbox(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.OUTBOX = {"TOPICS": {"made": {}}, "CELERY_WAKEUP": False}
    monkeypatch.setattr(register, "registered", {})


class TestAnAgentThatCommentsStatements:
    def test_changes_nothing(self, commented):
        handled: list[int] = []
        consumer(OrderMade, group="points")(lambda message: handled.append(message.order_id))

        with atomic():
            publish(OrderMade(order_id=1))
            publish_many([OrderMade(order_id=2), OrderMade(order_id=3)])
        run_once(RelayTarget("default", "default"), note="test", at_most=timedelta(seconds=10), idle_timeout=NO_IDLE_TIMEOUT)
        with closing(Worker(register.group("points"), "default")) as worker:
            worker.run(until_idle=True)

        assert sorted(handled) == [1, 2, 3]
        assert len(commented) > 10

    def test_does_not_keep_operators_from_looking(self, commented):
        with atomic():
            publish(OrderMade(order_id=1))

        maintain("default")
        call_command("outbox_schema", against_database=True, database=["default"], stdout=StringIO())
        with pytest.raises(SystemExit):  # no relay runs
            call_command("outbox_status", database=["default"], stdout=StringIO())
        found = find(database.raw("default"), parse("order_id=1"), limit=10)

        assert len(found.ids) == 1
        assert all(isinstance(statement, str) for statement in commented)
