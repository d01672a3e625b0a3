"""The findings of a run that are new: a nightly audit finds an old loss every night, but alerts only once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from django.db.models import Q

from outbox.pipeline.models import AuditFinding, AuditRun
from outbox.pipeline.spark.findings import FindingKind

# These kinds are about each message by itself, others about several.
OF_EACH = (FindingKind.LOST, FindingKind.LATE, FindingKind.ORPHAN)


def new_findings(run: AuditRun) -> list[AuditFinding]:
    """
    Return the findings of a run that are not known from earlier runs.

    A finding is known if the newest earlier run that went as far back has it, or a run since then, or if an operator has
    acknowledged it in any run. A finding whose messages were sent again is new when it is found once more.
    """
    using = run._state.db
    earlier = AuditRun.objects.using(using).filter(state=AuditRun.RunState.DONE, pk__lt=run.pk)
    as_far_back = Q(since=None) if run.since is None else Q(since=None) | Q(since__lte=run.since)
    newest = earlier.filter(as_far_back).order_by("-pk").values_list("pk", flat=True).first() or 0
    is_open = Q(run__gte=newest, resent_at=None) | ~Q(acknowledged_at=None)
    known: dict[tuple[Any, ...], list[AuditFinding]] = defaultdict(list)
    for one in AuditFinding.objects.using(using).filter(is_open, run__in=earlier):
        known[_place(one)].append(one)
    return [one for one in run.findings.order_by("pk") if not is_known(one, known[_place(one)])]


def is_known(one: AuditFinding, before: Sequence[AuditFinding]) -> bool:
    """Return whether earlier findings at the same location cover a finding: they are equal, or contain all its messages."""
    if any(_whole(one) == _whole(other) for other in before):
        return True
    if one.kind not in OF_EACH:
        return False
    if one.first_number is not None and one.last_number is not None:
        return any(_has_all(other, one.first_number, one.last_number) for other in before)
    named = _names(one)
    return len(named) == one.count and named <= {name for other in before for name in _names(other)}


def _place(one: AuditFinding) -> tuple[Any, ...]:
    return one.kind, one.stage, one.topic, one.source, one.lane, one.consumer_group, one.subject


def _whole(one: AuditFinding) -> tuple[Any, ...]:
    return one.text, _names(one)


def _names(one: AuditFinding) -> set[str]:
    return {*one.message_ids, *one.about}


def _has_all(one: AuditFinding, first: int, last: int) -> bool:
    """Return whether a finding contains all of these numbers."""
    if one.first_number is None or one.last_number is None or one.last_number - one.first_number + 1 != one.count:
        return False
    return one.first_number <= first and last <= one.last_number
