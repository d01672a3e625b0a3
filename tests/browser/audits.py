"""An audit's run, as `outbox_audit` stores it, of a message that is then really lost at the broker; Spark is not asked."""

from dataclasses import dataclass

import psycopg

# The newest message that went all the way, with its place.
SENT = """
SELECT u.id, s.id, b.lane, b.first_seq + u.n - 1 FROM outbox_batch b CROSS JOIN outbox_source s
JOIN outbox_topic t ON t.id = b.topic_id AND t.name = 'shipments', unnest(b.message_ids) WITH ORDINALITY u(id, n)
WHERE b.state = 3 AND u.n <> ALL(b.split) ORDER BY u.id DESC LIMIT 1
"""
LOSE = "DELETE FROM outbox_embedded_message WHERE message_id = %s"

RUN = """
INSERT INTO outbox_audit_run (state, started_at, ended_at, asked_by, host, pid, as_of, settle_seconds, seconds, found, counts,
    code_version, data_digest, verdict, signature, exit_code, error)
VALUES ('done', now() - interval '2 minutes', now(), 'beat', 'worker-1', 4711, now(), 300, 41, 1,
    '{"shipments": {"assigned": 97, "sent": 97, "broker": 96, "handled by letters": 97}}', '1.0+3f2a9c0d1b7e', 'sha256:7d0c',
    '{"run": 1}', 'signed', 1, '') RETURNING id
"""
FINDING = """
INSERT INTO outbox_audit_finding (run_id, kind, stage, topic, source, lane, consumer_group, subject, first_number, last_number,
    count, message_ids, about, text, acknowledged_by, note, resent_by, resent_count)
VALUES (%(run)s, 'lost', 'broker', 'shipments', %(source)s, %(lane)s, '', '', %(number)s, %(number)s, 1, ARRAY[%(message)s], '{}',
    'lost: 1 x topic ''shipments'', lane ' || %(lane)s || ', number ' || %(number)s || ', at broker', '', '', '', 0)
"""
LATENCY = """
INSERT INTO outbox_audit_latency (run_id, topic, hop, consumer_group, minute, bins, counts)
SELECT %(run)s, 'shipments', h.hop, h.grp, date_trunc('minute', now()) - n * interval '15 minutes',
    ARRAY[h.bin, h.bin + 8 + n %% 7, h.bin + 24 + n %% 11], ARRAY[90, 9, 1]
FROM generate_series(0, 90) n, (VALUES ('store', '', 110), ('handle', 'letters', 124)) h(hop, grp, bin)
"""
BACKLOG = """
INSERT INTO outbox_audit_backlog (run_id, consumer_group, topic, backlog, growth, cause, onset_at, most_repeated, minutes)
SELECT %(run)s, 'letters', 'shipments', 480, 24.5, 'consumption slower', now() - interval '20 minutes', '[]',
    jsonb_agg(jsonb_build_array(extract(epoch FROM now())::bigint - n * 60, greatest(0, 480 - n * 24)) ORDER BY n DESC)
FROM generate_series(0, 600) n
"""

# Days on their way to the lake, as `outbox_archive` leaves them.
ARCHIVED = """
INSERT INTO outbox_archived_day (day, state, attempt, rows, digest, manifest, planned_at, committed_at, deleted_at)
VALUES (current_date - 9, 'deleted', 1, 48213, '1', '{}', now() - interval '9 hours', now() - interval '8 hours',
    now() - interval '8 hours'), (current_date - 8, 'committed', 2, 51007, '2', '{}', now() - interval '1 hour', now(), NULL)
"""


@dataclass(frozen=True)
class Lost:
    """A run that found one message lost."""

    run: int
    message: str


def lose_one(connection: psycopg.Connection) -> Lost:
    """Take a message away from the broker, and write down the run that finds it."""
    message, source, lane, number = connection.execute(SENT).fetchone() or ()
    connection.execute(LOSE, [str(message)])
    (run,) = connection.execute(RUN).fetchone() or ()
    found = {"run": run, "source": source, "lane": lane, "number": number, "message": str(message)}
    for statement in (FINDING, LATENCY, BACKLOG):
        connection.execute(statement, found)
    return Lost(run, str(message))
