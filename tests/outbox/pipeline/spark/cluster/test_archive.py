"""The archive on a cluster, and an audit of it."""

import json
from datetime import UTC, datetime, time

import pytest
from django.db.models import F
from django.db.models.expressions import RawSQL

from outbox.models import Batch, CheckBack, FailedSend, Inbox, Lane, MessageRow, OperatorAct
from tests.outbox.pipeline.spark.archive.conftest import FIRST, PER_DAY, SECOND
from tests.outbox.pipeline.spark.cluster.commands import run, shape

pytestmark = pytest.mark.slow


class TestTheCommandOfThePage:
    def test_archives_a_day_that_is_judged_as_if_it_had_never_left(self, ids, with_archive, settings, of_page, audit_here):
        after = datetime.now(UTC) - datetime.combine(SECOND, time(1), UTC)
        settings.OUTBOX = {**settings.OUTBOX, "PIPELINE": {"ARCHIVE": {"PATH": str(with_archive), "AFTER": after}}}
        for model in (CheckBack, FailedSend, OperatorAct):  # each is a file more, of which an audit needs nothing
            model.objects.all().delete()
        Inbox.objects.update(source=RawSQL("SELECT id FROM outbox_source", []))
        Inbox.objects.filter(number=3).delete()
        Inbox.objects.filter(handled_at__date=SECOND).update(number=F("number") + PER_DAY)
        Batch.objects.filter(claimed_at__date=SECOND).update(first_seq=F("first_seq") + PER_DAY)
        Lane.objects.create(topic_id=MessageRow.objects.first().topic_id, lane=1, last_seq=2 * PER_DAY + 1)
        whole = audit_here()

        said, code = run(of_page("python manage.py outbox_archive"), "--database", "default", "--json")

        assert (code, list(json.loads(said)["default"]["days"])) == (0, [str(FIRST)]), said
        assert {str(one.id) for one in MessageRow.objects.all()} == {*ids[PER_DAY:]}
        said, code = run(of_page("python manage.py outbox_audit --archived"), "--json")
        assert code == 1, said
        assert shape(json.loads(said)) == whole
