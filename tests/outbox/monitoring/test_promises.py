from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as django_settings

from outbox.brokers.base import SendGuarantee
from outbox.errors import UnknownTopic
from outbox.monitoring.promises import PUBLISHED, promise_of

PAGE = Path(django_settings.BASE_DIR) / "docs/guarantees.md"
EMBEDDED = "outbox.embedded.EmbeddedBroker"
RABBITMQ = "outbox.brokers.rabbitmq.RabbitMQBroker"


@pytest.fixture
def promised(settings: Any) -> Any:
    """Return a function that returns what is promised about a topic of a broker."""

    def promised(backend: str, type_: str | None = None, *, retention: timedelta = timedelta(days=7), **options: Any) -> Any:
        settings.OUTBOX = {
            **settings.OUTBOX,
            "BROKERS": {**settings.OUTBOX["BROKERS"], "asked": {"BACKEND": backend, "OPTIONS": options}},
            "TOPICS": {**settings.OUTBOX["TOPICS"], "asked": {"BROKER": "asked", "TYPE": type_}},
            "RETENTION": retention,
        }
        return promise_of("asked")

    return promised


class TestAPromise:
    def test_says_once_where_the_broker_drops_copies(self, promised):
        promise = promised(EMBEDDED, "fifo", retention=timedelta(hours=36))

        assert (promise.how_often, promise.published) == (SendGuarantee.ONCE, PUBLISHED[SendGuarantee.ONCE])
        assert promise.order == "Messages with the same key are delivered in the order of the database commits."
        assert promise.duplicates.endswith("that it has handled, for 36 h at least (RETENTION).")
        assert promise.check_backs == "Messages are sent in one phase, so there are no check-backs."

    def test_says_how_long_a_half_message_is_asked_about(self, promised):
        assert promised(EMBEDDED).check_backs.startswith("For 32 min, check-backs are answered")

    def test_says_at_least_once_where_it_may_store_copies(self, promised):
        promise = promised(RABBITMQ, NODES=["amqp://guest@localhost/"])

        assert promise.how_often is SendGuarantee.AT_LEAST_ONCE
        assert promise.order == "Messages are delivered in any order."

    def test_of_a_topic_that_is_not_in_the_settings_is_an_error(self):
        with pytest.raises(UnknownTopic, match="'nowhere'"):
            promise_of("nowhere")


class TestTheGuaranteesPage:
    @pytest.mark.parametrize("how_often", SendGuarantee)
    def test_has_the_sentence_of_each(self, how_often):
        assert f"| {how_often} | {PUBLISHED[how_often]} |" in PAGE.read_text()
