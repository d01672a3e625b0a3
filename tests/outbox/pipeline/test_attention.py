import pytest
from django.utils import timezone

from outbox import database
from outbox.monitoring.attention import read_attention
from outbox.pipeline.models import AuditFinding, AuditRun

pytestmark = pytest.mark.django_db


def a_run(state=AuditRun.RunState.DONE, **fields):
    about = {"asked_by": "command", "host": "h", "pid": 1, "settle_seconds": 300, "ended_at": timezone.now()}
    return AuditRun.objects.create(state=state, **about, **fields)


def a_finding(run, **fields):
    about = {"kind": "loss", "stage": "sent", "topic": "orders", "source": "s", "consumer_group": "", "subject": "", "count": 2}
    texts = {"message_ids": [], "about": [], "text": "2 messages of topic orders were lost."}
    return AuditFinding.objects.create(run=run, **about, **texts, **fields)


def causes():
    return [one.msg for one in read_attention(database.raw("default"), "default") if one.id == "outbox_pipeline.audit"]


def test_open_findings_of_the_newest_audit_are_named():
    a_finding(a_run())
    run = a_run()
    a_finding(run)

    [cause] = causes()

    assert cause.startswith(f"1 finding of audit {run.id}, 0.")
    assert cause.endswith("The first: 2 messages of topic orders were lost.")


@pytest.mark.parametrize("what", ["acknowledged_at", "resent_at"])
def test_findings_that_somebody_has_settled_are_not(what):
    a_finding(a_run(), **{what: timezone.now()})

    assert causes() == []


def test_an_audit_without_an_answer_is_named_until_the_next_one():
    failed = a_run(AuditRun.RunState.FAILED, error="The database went away.")

    assert causes() == [f"Audit {failed.id} failed: The database went away."]

    a_run()
    assert causes() == []
