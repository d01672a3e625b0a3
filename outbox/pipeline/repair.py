"""
Sending the lost ones again: exactly those that a finding names, as far as they can be had.

What its broker or its group has meanwhile is not sent. A message lost behind its broker is sent once more by a relay, under
its old number; one that only a group lost is delivered to that group alone where the broker keeps one copy of each
message, and otherwise sent again, whereupon the inboxes of all other groups drop it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from django.utils import timezone

from outbox import conf, database
from outbox.batches.resend import GONE, resend
from outbox.brokers.capabilities import DeadLetters
from outbox.consuming.delivery_info import uuid_of
from outbox.consuming.register import groups
from outbox.database import Connection, outermost
from outbox.pipeline.models import AuditFinding
from outbox.pipeline.spark.findings import Kind, Stage

AT_ONCE = 10_000  # messages of one finding

# The messages that have these numbers, as far as the outbox knows.
NUMBERED = """
SELECT u.id FROM outbox_batch b JOIN outbox_topic t ON t.id = b.topic_id, unnest(b.message_ids) WITH ORDINALITY u(id, n)
WHERE t.name = %(topic)s AND b.lane = %(lane)s AND u.n <> ALL(b.split)
AND b.first_seq <= %(last)s AND b.first_seq + cardinality(b.message_ids) > %(first)s
AND b.first_seq + u.n - 1 BETWEEN %(first)s AND %(last)s ORDER BY b.first_seq + u.n LIMIT %(limit)s
"""

KNOWN = "SELECT id FROM outbox_message WHERE id = ANY(%s) AND topic_id <> 0"
HANDLED = "SELECT message_id FROM outbox_inbox WHERE consumer_group = %s AND message_id = ANY(%s)"
SOURCE = "SELECT id FROM outbox_source"

NOT_LOST = "Nothing of it is lost."
DONE_BEFORE = "They were sent again before."
OTHER_SOURCE = "They are another database's."
NO_MESSAGE = "No message was ever recorded for them; have the code publish again."
NO_TRACE = "Nobody knows what they were: their rows are gone everywhere, or were never there."
SCATTERED = "They are too many and too scattered to be told apart by their numbers. Audit a shorter range: --since."
MORE = f"They are more than {AT_ONCE}, which are sent at once. Audit again when these are there."
NOT_NAMED = "The audit did not name them. Audit again when the others are sent."
NO_TOPIC = "Settings have no topic of that name any more."
NO_GROUP = "The code has no group of that name any more."
HANDLED_SINCE = "Its group has handled it since."
NOT_THERE = "Its broker does not have it any more, or the group is about to get it."


@dataclass(slots=True)
class Again:
    """
    What of a finding can be sent again.

    Args:
        ids: these messages.
        refused: why -> how many cannot.
    """

    finding: AuditFinding
    ids: list[UUID] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)

    def refuse(self, reason: str, count: int) -> None:
        """Note that so many are not sent, and why."""
        if count:
            self.refused[reason] = self.refused.get(reason, 0) + count


def plan(finding: AuditFinding, using: str) -> Again:
    """Return what of a finding could be sent again now; changes nothing."""
    again = Again(finding)
    connection = database.raw(using)
    if reason := _objection(finding, connection):
        again.refuse(reason, finding.count)
        return again
    ids = _ids(finding, connection, again)
    known = {row[0] for row in connection.execute(KNOWN, [ids]).fetchall()}
    again.refuse(GONE, len(ids) - len(known))
    if finding.stage == Stage.INBOX:
        handled = {row[0] for row in connection.execute(HANDLED, [finding.consumer_group, list(known)]).fetchall()}
        again.refuse(HANDLED_SINCE, len(known & handled))
        known -= handled
    again.ids = [one for one in ids if one in known]
    return again


def send(finding_id: int, using: str, *, by: str) -> Again:
    """
    Send again what a finding says is lost, and note it there. Who comes second does nothing.

    Returns:
        What was sent, and why the rest was not.
    """
    with outermost.atomic(using):
        finding = AuditFinding.objects.using(using).select_for_update(of=("self",)).select_related("run").get(pk=finding_id)
        again = plan(finding, using)
        if not again.ids:
            return again
        done = _deliver(again) if _is_by_group(finding) else _send(again, database.raw(using), _lost_before(finding))
        again.ids = [one for one in again.ids if one in done]
        if again.ids:
            finding.sent_again_at, finding.sent_again_by, finding.sent_again = timezone.now(), by, len(again.ids)
            finding.save(update_fields=["sent_again_at", "sent_again_by", "sent_again"])
    return again


def _objection(finding: AuditFinding, connection: Connection) -> str:
    """Return why nothing of a finding can be sent again; empty: something may."""
    if finding.kind != Kind.LOST:
        return NOT_LOST
    if finding.sent_again_at is not None:
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
    """Return whether the finding names a range of which only some numbers are lost."""
    if finding.first_number is None or finding.last_number is None:
        return False
    return finding.last_number - finding.first_number + 1 != finding.count


def _ids(finding: AuditFinding, connection: Connection, again: Again) -> list[UUID]:
    """Return the messages of a finding: by their numbers, or where they have none by the ids that were named."""
    if finding.lane is None:
        named = [number for one in finding.message_ids if (number := uuid_of(one))]
        again.refuse(NOT_NAMED, finding.count - len(named))
        return named[:AT_ONCE]
    span = {"lane": finding.lane, "first": finding.first_number, "last": finding.last_number}
    rows = connection.execute(NUMBERED, {**span, "topic": finding.topic, "limit": AT_ONCE}).fetchall()
    if not _is_scattered(finding):
        again.refuse(GONE if len(rows) < AT_ONCE else MORE, finding.count - len(rows))
    return [row[0] for row in rows]


def _is_by_group(finding: AuditFinding) -> bool:
    alias = conf.topic_settings(finding.topic).broker
    return finding.stage == Stage.INBOX and conf.broker_class(alias).deduplicates_sends


def _lost_before(finding: AuditFinding) -> datetime:
    return finding.run.as_of or finding.run.started_at


def _deliver(again: Again) -> set[UUID]:
    """Ask the broker to deliver to the one group."""
    finding = again.finding
    with closing(conf.make_broker(conf.topic_settings(finding.topic).broker)) as broker:
        done = DeadLetters.of(broker).deliver_again(finding.consumer_group, [str(one) for one in again.ids])
    again.refuse(NOT_THERE, len(again.ids) - len(done))
    return _uuids(done)


def _send(again: Again, connection: Connection, lost_before: datetime) -> set[UUID]:
    """Leave it to a relay to send."""
    settled = resend(connection, again.ids, lost_before=lost_before)
    for reason in settled.refused.values():
        again.refuse(reason, 1)
    return set(again.ids) - _uuids(settled.refused)


def _uuids(texts: Iterable[str]) -> set[UUID]:
    return {UUID(text) for text in texts}


def counts(plans: Sequence[Again]) -> dict[str, int]:
    """Return for how many messages of which topic and stage these speak."""
    found: dict[str, int] = {}
    for one in plans:
        where = f"group {one.finding.consumer_group}" if one.finding.consumer_group else one.finding.stage
        place = f"{one.finding.topic}, lost at {where}"
        found[place] = found.get(place, 0) + len(one.ids)
    return {place: count for place, count in found.items() if count}


def refusals(plans: Sequence[Again]) -> dict[str, int]:
    """Sum up what cannot be sent again, and why."""
    found: dict[str, int] = {}
    for one in plans:
        for reason, count in one.refused.items():
            found[reason] = found.get(reason, 0) + count
    return found
