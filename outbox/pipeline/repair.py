"""
Send lost messages again: the messages of a finding, as far as they still exist.

A message that has arrived since the audit is not sent again. A relay sends messages that were lost at the broker, with their old
numbers. A message that only one group lost is stored as a deferred message of this group. The group's consumers then handle it,
and drop a copy that the broker may still deliver.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from django.utils import timezone
from django.utils.translation import gettext as _

from outbox import conf, database
from outbox.batches.operators import GONE, resend
from outbox.consuming.delivery_info import uuid_of
from outbox.consuming.register import groups
from outbox.database import Connection, guarded
from outbox.deliver_again import Undelivered, deliver_again
from outbox.pipeline.models import AuditFinding
from outbox.pipeline.spark.findings import FindingKind, Stage

MAX_MESSAGES = 10_000  # messages of one finding that are sent again at a time

# The messages with the numbers of a range.
NUMBERED = """
SELECT u.id FROM outbox_batch b JOIN outbox_topic t ON t.id = b.topic_id, unnest(b.message_ids) WITH ORDINALITY u(id, n)
WHERE t.name = %(topic)s AND b.lane = %(lane)s AND u.n <> ALL(b.split)
AND b.first_seq <= %(last)s AND b.first_seq + cardinality(b.message_ids) > %(first)s
AND b.first_seq + u.n - 1 BETWEEN %(first)s AND %(last)s ORDER BY b.first_seq + u.n LIMIT %(limit)s
"""

# The given messages whose rows still exist, and those that a group has handled or deferred.
KNOWN = "SELECT id FROM outbox_message WHERE id = ANY(%s) AND topic_id <> 0"
HANDLED = "SELECT message_id FROM outbox_inbox WHERE consumer_group = %s AND message_id = ANY(%s)"
DEFERRED = "SELECT message_id FROM outbox_deferred WHERE consumer_group = %s AND message_id = ANY(%s)"
SOURCE = "SELECT id FROM outbox_source"

NOT_LOST = "No message of this finding is lost."
DONE_BEFORE = "They were already sent again."
OTHER_SOURCE = "They belong to another database."
NO_MESSAGE = "No message was ever recorded for them; publish one from your code."
NO_TRACE = "Their content is unknown: their rows are gone everywhere, or never existed."
SCATTERED = "The finding covers too many scattered numbers to identify them. Audit a shorter range with --since."
MORE = f"Only {MAX_MESSAGES} are sent at a time. Run the audit again when these have arrived."
NOT_NAMED = "The audit did not name them. Run it again when the others have been sent."
NO_TOPIC = "The topic is no longer in settings."
NO_GROUP = "The consumer group is no longer in the code."
HANDLED_SINCE = "The group has handled them since."
DEFERRED_SINCE = "The group has deferred them since."


@dataclass(slots=True)
class ResendPlan:
    """
    Which messages of a finding can be sent again.

    Args:
        ids: the messages that can be sent again.
        refused: reason -> number of messages that cannot.
    """

    finding: AuditFinding
    ids: list[UUID] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)

    def refuse(self, reason: str, count: int) -> None:
        """Add a number of messages that cannot be sent again, with the reason."""
        if count:
            self.refused[reason] += count


def plan(finding: AuditFinding, using: str) -> ResendPlan:
    """Return which messages of a finding can be sent again now. Changes nothing."""
    resend_plan = ResendPlan(finding)
    connection = database.raw(using)
    if reason := _why_not(finding, connection):
        resend_plan.refuse(reason, finding.count)
        return resend_plan
    ids = _ids(finding, connection, resend_plan)
    sendable = {row[0] for row in connection.execute(KNOWN, [ids]).fetchall()}
    resend_plan.refuse(GONE, len(ids) - len(sendable))
    if finding.stage == Stage.INBOX:
        inbox = database.raw(groups()[finding.consumer_group].using)
        for query, reason in ((HANDLED, HANDLED_SINCE), (DEFERRED, DEFERRED_SINCE)):
            arrived = {row[0] for row in inbox.execute(query, [finding.consumer_group, list(sendable)]).fetchall()}
            resend_plan.refuse(reason, len(arrived))
            sendable -= arrived
    resend_plan.ids = [message_id for message_id in ids if message_id in sendable]
    return resend_plan


def send(finding_id: int, using: str, *, by: str) -> ResendPlan:
    """
    Send the lost messages of a finding again, and record that in the finding. A second call sends nothing.

    Returns:
        The plan: which messages are sent again, and which are not.
    """
    with guarded.atomic(using):
        finding = AuditFinding.objects.using(using).select_for_update(of=("self",)).select_related("run").get(pk=finding_id)
        resend_plan = plan(finding, using)
        if not resend_plan.ids:
            return resend_plan
        connection = database.raw(using)
        if finding.stage == Stage.INBOX:
            group, topic = finding.consumer_group, finding.topic
            deliver_again((Undelivered(group, using, topic, None, None, message_id) for message_id in resend_plan.ids), by=by)
        else:
            _send(resend_plan, connection, finding.run.as_of or finding.run.started_at)
        if resend_plan.ids:
            finding.resent_at, finding.resent_by, finding.resent_count = timezone.now(), by, len(resend_plan.ids)
            finding.save(update_fields=["resent_at", "resent_by", "resent_count"])
    return resend_plan


def _why_not(finding: AuditFinding, connection: Connection) -> str:
    """Return why no message of a finding can be sent again; "" if some may be."""
    if finding.kind != FindingKind.LOST:
        return NOT_LOST
    if finding.resent_at is not None:
        return DONE_BEFORE
    if finding.subject:
        return NO_MESSAGE
    if finding.source and connection.execute(SOURCE).fetchone() != (finding.source,):
        return OTHER_SOURCE
    if finding.topic not in conf.settings().topics:
        return NO_TOPIC
    if finding.stage == Stage.INBOX and finding.consumer_group not in groups():
        return NO_GROUP
    if finding.stage == Stage.OUTBOX and finding.lane is not None:
        return NO_TRACE
    return SCATTERED if _is_scattered(finding) and finding.stage != Stage.INBOX else ""


def _is_scattered(finding: AuditFinding) -> bool:
    """Return whether only some numbers of the finding's range are lost."""
    if finding.first_number is None or finding.last_number is None:
        return False
    return finding.last_number - finding.first_number + 1 != finding.count


def _ids(finding: AuditFinding, connection: Connection, resend_plan: ResendPlan) -> list[UUID]:
    """
    Return the messages of a finding, by their numbers, or by the ids in the finding if they have no numbers.

    Adds to the plan's refusals how many messages cannot be identified.
    """
    if finding.lane is None:
        known_ids = [uuid_of(message_id) for message_id in finding.message_ids]
        resend_plan.refuse(NOT_NAMED, finding.count - len(known_ids))
        return known_ids[:MAX_MESSAGES]
    span = {"lane": finding.lane, "first": finding.first_number, "last": finding.last_number}
    rows = connection.execute(NUMBERED, {**span, "topic": finding.topic, "limit": MAX_MESSAGES}).fetchall()
    if not _is_scattered(finding):
        resend_plan.refuse(GONE if len(rows) < MAX_MESSAGES else MORE, finding.count - len(rows))
    return [row[0] for row in rows]


def _send(resend_plan: ResendPlan, connection: Connection, lost_before: datetime) -> None:
    """Hand the messages of the plan to a relay to be sent again. Messages that cannot be sent become refusals of the plan."""
    settled = resend(connection, resend_plan.ids, lost_before=lost_before)
    for reason in settled.refused.values():
        resend_plan.refuse(reason, 1)
    refused = {UUID(message_id) for message_id in settled.refused}
    resend_plan.ids = [message_id for message_id in resend_plan.ids if message_id not in refused]


def counts(plans: Sequence[ResendPlan]) -> dict[str, int]:
    """Return the number of messages to send, by a description of topic and stage."""
    sums: Counter[str] = Counter()
    for planned in plans:
        stage = _("group {}").format(planned.finding.consumer_group) if planned.finding.consumer_group else planned.finding.stage
        description = _("{}, lost at {}").format(planned.finding.topic, stage)
        sums[description] += len(planned.ids)
    return dict(+sums)


def refusals(plans: Sequence[ResendPlan]) -> dict[str, int]:
    """Return the number of messages that cannot be sent again, by reason."""
    sums: Counter[str] = Counter()
    for planned in plans:
        sums.update(planned.refused)
    return dict(sums)
