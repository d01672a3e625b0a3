"""
Send lost messages again: exactly those that a finding names, as far as they still exist.

A message that the broker or the group has by now is not sent. A message that is lost at the broker is sent by a relay, under its
old number. A message that only one group lost is deferred in its inbox: its consumers handle it, and a copy that still comes from
the broker is dropped.
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

MAX_MESSAGES = 10_000  # of one finding

# The messages with a range of numbers.
NUMBERED = """
SELECT u.id FROM outbox_batch b JOIN outbox_topic t ON t.id = b.topic_id, unnest(b.message_ids) WITH ORDINALITY u(id, n)
WHERE t.name = %(topic)s AND b.lane = %(lane)s AND u.n <> ALL(b.split)
AND b.first_seq <= %(last)s AND b.first_seq + cardinality(b.message_ids) > %(first)s
AND b.first_seq + u.n - 1 BETWEEN %(first)s AND %(last)s ORDER BY b.first_seq + u.n LIMIT %(limit)s
"""

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
        ids: the messages that can.
        refused: reason -> number of messages that cannot.
    """

    finding: AuditFinding
    ids: list[UUID] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)

    def refuse(self, reason: str, count: int) -> None:
        """Note that a number of messages cannot be sent, and why."""
        if count:
            self.refused[reason] += count


def plan(finding: AuditFinding, using: str) -> ResendPlan:
    """Return which messages of a finding can be sent again now. Changes nothing."""
    again = ResendPlan(finding)
    connection = database.raw(using)
    if reason := _why_not(finding, connection):
        again.refuse(reason, finding.count)
        return again
    ids = _ids(finding, connection, again)
    known = {row[0] for row in connection.execute(KNOWN, [ids]).fetchall()}
    again.refuse(GONE, len(ids) - len(known))
    if finding.stage == Stage.INBOX:
        inbox = database.raw(groups()[finding.consumer_group].using)
        for question, reason in ((HANDLED, HANDLED_SINCE), (DEFERRED, DEFERRED_SINCE)):
            arrived = {row[0] for row in inbox.execute(question, [finding.consumer_group, list(known)]).fetchall()}
            again.refuse(reason, len(arrived))
            known -= arrived
    again.ids = [message_id for message_id in ids if message_id in known]
    return again


def send(finding_id: int, using: str, *, by: str) -> ResendPlan:
    """
    Send the lost messages of a finding again, and store that with the finding. A second call does nothing.

    Returns:
        The plan as it was carried out.
    """
    with guarded.atomic(using):
        finding = AuditFinding.objects.using(using).select_for_update(of=("self",)).select_related("run").get(pk=finding_id)
        again = plan(finding, using)
        if not again.ids:
            return again
        connection = database.raw(using)
        if finding.stage == Stage.INBOX:
            group, topic = finding.consumer_group, finding.topic
            deliver_again((Undelivered(group, using, topic, None, None, message_id) for message_id in again.ids), by=by)
        else:
            _send(again, connection, finding.run.as_of or finding.run.started_at)
        if again.ids:
            finding.resent_at, finding.resent_by, finding.resent_count = timezone.now(), by, len(again.ids)
            finding.save(update_fields=["resent_at", "resent_by", "resent_count"])
    return again


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


def _ids(finding: AuditFinding, connection: Connection, again: ResendPlan) -> list[UUID]:
    """Return the messages of a finding by their numbers, or by the ids in the finding if they have no numbers."""
    if finding.lane is None:
        named = [uuid_of(message_id) for message_id in finding.message_ids]
        again.refuse(NOT_NAMED, finding.count - len(named))
        return named[:MAX_MESSAGES]
    span = {"lane": finding.lane, "first": finding.first_number, "last": finding.last_number}
    rows = connection.execute(NUMBERED, {**span, "topic": finding.topic, "limit": MAX_MESSAGES}).fetchall()
    if not _is_scattered(finding):
        again.refuse(GONE if len(rows) < MAX_MESSAGES else MORE, finding.count - len(rows))
    return [row[0] for row in rows]


def _send(again: ResendPlan, connection: Connection, lost_before: datetime) -> None:
    """Schedule the messages to be sent again by a relay."""
    settled = resend(connection, again.ids, lost_before=lost_before)
    for reason in settled.refused.values():
        again.refuse(reason, 1)
    refused = {UUID(message_id) for message_id in settled.refused}
    again.ids = [message_id for message_id in again.ids if message_id not in refused]


def counts(plans: Sequence[ResendPlan]) -> dict[str, int]:
    """Return the number of messages to send, by a description of topic and stage."""
    sums: Counter[str] = Counter()
    for planned in plans:
        where = _("group {}").format(planned.finding.consumer_group) if planned.finding.consumer_group else planned.finding.stage
        place = _("{}, lost at {}").format(planned.finding.topic, where)
        sums[place] += len(planned.ids)
    return dict(+sums)


def refusals(plans: Sequence[ResendPlan]) -> dict[str, int]:
    """Return the number of messages that cannot be sent again, by reason."""
    sums: Counter[str] = Counter()
    for planned in plans:
        sums.update(planned.refused)
    return dict(sums)
