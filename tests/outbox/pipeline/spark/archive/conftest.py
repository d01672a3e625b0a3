"""Two finished days and what went with them."""

from datetime import UTC, date, datetime, time, timedelta

import pytest
from django.db import connection as django_connection

from outbox import database
from outbox.database import partitions
from outbox.models import Duplicate, FailedDelivery, FailedSend, Inbox, OperatorAct, State
from outbox.pipeline.job_config import database_source
from outbox.pipeline.models import RecordedMessage
from outbox.pipeline.spark.archiver import ArchiveConfig, Archiver
from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.lake import Lake
from outbox.pipeline.spark.records import archive_lock

FIRST, SECOND = date(2001, 2, 3), date(2001, 2, 4)
BEFORE = date(2001, 2, 5)
PER_DAY = 8


@pytest.fixture
def ids(transactional_db):
    """Two days of messages that were sent and handled, with a try that failed, a duplicate, a failed send and a check-back."""
    with database.connect("default") as own:
        for day in (FIRST, SECOND):
            partitions.create_partition(own, day)
    yield [*fill(FIRST), *fill(SECOND)]
    with database.connect("default") as own, django_connection.cursor() as cursor:
        for day in partitions.days(own):
            if day.year < 2020:
                cursor.execute(f"DROP TABLE {partitions.table_of(day)}")


def fill(day):
    from outbox.testing.factories import CheckBackFactory
    from tests.factories import BatchFactory, MessageRowFactory, TopicFactory, message_id

    topic = TopicFactory(name="orders")
    at = [datetime.combine(day, time(6), tzinfo=UTC) + timedelta(hours=n) for n in range(PER_DAY)]
    ids = [message_id(moment) for moment in at]
    for number, (one, moment) in enumerate(zip(ids, at, strict=True), start=1):
        about = None if number == 1 else f"shop.order:{number}"
        MessageRowFactory(id=one, topic=topic, key=f"Zoë {number}", about=about, body=b'{"n": %d}' % number, created_at=moment)
        Inbox.objects.create(
            consumer_group="cart", idempotency_key=one, message_id=one, topic="orders", lane=1, number=number, handled_at=moment
        )
    sent = {"topic": topic, "state": State.SENT, "lane": 1, "claimed_at": at[-1], "sent_at": at[-1]}
    BatchFactory(message_ids=ids[:5], first_seq=1, split=[2], **sent)
    BatchFactory(message_ids=ids[1:2], first_seq=2, **sent)
    BatchFactory(message_ids=ids[5:], first_seq=6, **sent)
    about = {"consumer_group": "cart", "message_id": ids[0], "topic": "orders"}
    FailedDelivery.objects.create(**about, delivery_count=1, outcome="retry", fingerprint="f", error="e", failed_at=at[0])
    Duplicate.objects.create(**about, delivery_count=2, dropped_at=at[0])
    RecordedMessage.objects.create(message_id=ids[0], topic="orders", queue="q", pos=day.day, lane=1, number=1, recorded_at=at[0])
    FailedSend.objects.create(batch_id=1, attempt=1, message_ids=ids[:2], verdict="unsure", reason="r", failed_at=at[0])
    OperatorAct.objects.create(**about, act="replayed", reason="r", acted_by="ada", acted_at=at[0])
    CheckBackFactory(request_id=str(day), message_id=ids[0], milliseconds=0.25, answered_at=at[0])
    return [str(one) for one in ids]


@pytest.fixture
def url(ids):
    return database_source("default").url


@pytest.fixture
def lake(tmp_path):
    return Lake(tmp_path / "lake")


@pytest.fixture
def archive(url, lake):
    """Archive all that is due; give what was done."""
    from tests.outbox.pipeline.spark.archive.arrow import ArrowWriter

    def archive(*, before=BEFORE, writer=None, patience_seconds=0.0, rows_per_part=3, said=None):
        config = ArchiveConfig(
            PipelineConfig(database_source("default")),
            *(str(lake.root), before),
            patience_seconds=patience_seconds,
            rows_per_part=rows_per_part,
        )
        with archive_lock(url) as connection:
            log = (lambda text: None) if said is None else said.append
            return Archiver(config, connection, lake, lambda: writer or ArrowWriter(url), log).run()

    return archive
