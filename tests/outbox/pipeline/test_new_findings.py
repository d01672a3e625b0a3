"""Which findings are new."""

from datetime import UTC, datetime, timedelta

import pytest
from django.utils import timezone

from outbox.pipeline import runs
from outbox.pipeline.models import AuditFinding, AuditRun
from outbox.pipeline.runs import new_findings

pytestmark = pytest.mark.django_db

NIGHT = datetime(2026, 3, 1, 3, tzinfo=UTC)
PLACE = {"stage": "broker", "topic": "orders", "source": "s", "consumer_group": "", "subject": ""}


def lost(first, last, count=None, **other):
    count = last - first + 1 if count is None else count
    numbers = {"lane": 1, "first_number": first, "last_number": last, "count": count}
    return {"kind": "lost", **PLACE, **numbers, "message_ids": [], "about": [], "text": f"{count} of {first} to {last}", **other}


def named(*ids, count=None, **other):
    numbers = {"lane": None, "first_number": None, "last_number": None, "count": count or len(ids)}
    return {"kind": "lost", **PLACE, **numbers, "message_ids": [*ids], "about": [], "text": f"{count or len(ids)} x", **other}


def audited(*findings, since=None, state=AuditRun.RunState.DONE):
    """Store a run with these findings."""
    run = runs.begin("default", asked_by="beat", since=since, settle_seconds=1)
    AuditRun.objects.filter(pk=run.pk).update(state=state)
    for one in findings:
        AuditFinding.objects.create(run=run, **one)
    return run


def told(run):
    return [one.text for one in new_findings(run)]


class TestNews:
    def test_is_all_that_the_first_run_finds(self):
        assert told(audited(lost(5, 9), named("a"))) == ["5 of 5 to 9", "1 x"]

    def test_is_not_what_the_run_before_found(self):
        audited(lost(5, 9), named("a"))

        assert told(audited(lost(5, 9), named("a"))) == []

    @pytest.mark.parametrize(
        "other",
        [
            lost(5, 10),
            lost(4, 9),
            lost(5, 9, lane=2),
            lost(5, 9, kind="late"),
            lost(5, 9, stage="inbox", consumer_group="cart"),
            lost(5, 9, topic="bills"),
            lost(5, 9, source="another"),
        ],
    )
    def test_is_what_differs_in_place_kind_or_numbers(self, other):
        audited(lost(5, 9))

        assert told(audited(other)) == [other["text"]]

    def test_is_not_what_is_left_of_an_earlier_finding(self):
        audited(lost(5, 9), named("a", "b"))

        assert told(audited(lost(7, 7), lost(9, 9), named("b"))) == []

    def test_may_lie_between_numbers_that_were_found(self):
        audited(lost(5, 900, count=400))

        assert told(audited(lost(7, 7))) == ["1 of 7 to 7"]
        assert told(audited(lost(5, 900, count=400))) == ["400 of 5 to 900"]

    def test_is_another_copy_of_a_message_that_had_two(self):
        twice = lost(5, 9, kind="duplicated")
        audited(twice)

        assert told(audited(twice)) == []
        assert told(audited({**twice, "count": 6, "text": "6 copies"})) == ["6 copies"]
        assert told(audited(lost(7, 7, count=1, kind="duplicated"))) == ["1 of 7 to 7"]

    def test_is_a_message_that_was_not_named_before(self):
        audited(named("a", "b"))

        assert told(audited(named("a", "c"))) == ["2 x"]

    def test_may_be_among_those_too_many_to_be_named(self):
        audited(named("a", "b", count=3))

        assert told(audited(named("a", "b", count=3))) == []
        assert told(audited(named("a", "b", count=4))) == ["4 x"]

    def test_is_what_was_over_in_between(self):
        audited(lost(5, 9))
        audited()

        assert told(audited(lost(5, 9))) == ["5 of 5 to 9"]

    def test_is_not_what_a_run_that_looked_less_far_back_could_not_find(self):
        audited(lost(5, 9), since=NIGHT)
        audited(since=NIGHT + timedelta(days=1))

        assert told(audited(lost(5, 9), since=NIGHT)) == []

    def test_is_not_what_was_found_before_the_archive_was_audited_too(self):
        audited(lost(5, 9), since=NIGHT)

        assert told(audited(lost(5, 9), lost(1, 2))) == ["2 of 1 to 2"]

    def test_is_what_a_run_without_an_answer_found(self):
        audited(lost(5, 9), state=AuditRun.RunState.FAILED)

        assert told(audited(lost(5, 9))) == ["5 of 5 to 9"]

    def test_is_what_was_sent_again_and_is_lost_still(self):
        audited(lost(5, 9))
        AuditFinding.objects.update(resent_at=timezone.now())

        assert told(audited(lost(5, 9))) == ["5 of 5 to 9"]
        assert told(audited(lost(5, 9))) == []

    def test_is_never_what_a_person_acknowledged(self):
        audited(lost(5, 9))
        AuditFinding.objects.update(acknowledged_at=timezone.now(), resent_at=timezone.now())
        audited()

        assert told(audited(lost(5, 9))) == []
