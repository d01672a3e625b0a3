from datetime import UTC, datetime, timedelta

import pytest

from outbox.models import Inbox
from outbox.pipeline.models import RecordedTopic
from outbox.testing.clock import age_rows
from tests.factories import message_id

pytestmark = pytest.mark.django_db

NOW = datetime(2026, 1, 2, tzinfo=UTC)
DAY = timedelta(days=1)


class TestAgeRows:
    def test_puts_back_what_the_outbox_and_its_apps_have_stored(self):
        Inbox.objects.create(consumer_group="cart", idempotency_key="1", message_id=message_id(), topic="orders", handled_at=NOW)
        RecordedTopic.objects.create(topic="orders", broker="rocketmq", consumer_group="outbox-recorder", began_at=NOW)

        age_rows("default", DAY)

        assert Inbox.objects.get().handled_at == NOW - DAY
        assert RecordedTopic.objects.get().began_at == NOW - DAY
