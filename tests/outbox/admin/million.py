"""Very many messages, most of them sent, with the books that go with them; made in SQL."""

from outbox.database import Connection

# Ids as uuid7 makes them: 10 ms apart, back from now; the newest are those that wait.
IDS = """
CREATE TEMPORARY TABLE numbered ON COMMIT DROP AS
SELECT n, (lpad(to_hex((extract(epoch FROM clock_timestamp()) * 1000)::bigint - (%(messages)s - n) * 10), 12, '0')
    || '7000' || '8' || lpad(to_hex(n), 15, '0'))::uuid AS id
FROM generate_series(1, %(messages)s) n
"""

FILL = """
INSERT INTO outbox_message (id, topic_id, key, about, body, headers, created_at)
SELECT id, CASE WHEN n %% 1000 = 0 THEN %(rare)s ELSE %(orders)s END, n::text,
    CASE WHEN n %% 10 = 0 THEN 'shop.order:' || n END, '{"invoice": "1"}',
    '{"ce-type": "OrderPlaced", "content-type": "application/json"}', clock_timestamp() FROM numbered;

INSERT INTO outbox_batch (topic_id, lane, first_seq, message_ids, state, claimed_at, sent_at)
SELECT %(orders)s, 1, min(n), array_agg(id), 3, now(), now()
FROM numbered WHERE n <= %(sent)s GROUP BY n / 500;

INSERT INTO outbox_batch (topic_id, lane, first_seq, message_ids, state, claimed_at, last_error)
SELECT %(orders)s, 2, n, ARRAY[id], 4, now(), 'refused' FROM numbered WHERE n > %(sent)s AND n <= %(sent)s + 100;
INSERT INTO outbox_dead (message_id, batch_id, topic, key, headers, body, reason)
SELECT b.message_ids[1], b.id, 'orders', '', '{}', '{}', 'refused' FROM outbox_batch b WHERE state = 4;
INSERT INTO outbox_batch (topic_id, lane, first_seq, message_ids, state, failures, due_at, claimed_at)
SELECT %(orders)s, 2, n, ARRAY[id], 0, 1, now(), now() FROM numbered WHERE n > %(sent)s + 100 AND n <= %(sent)s + 200;
INSERT INTO outbox_batch (topic_id, lane, first_seq, message_ids, half_ids, state, decided_at, claimed_at)
SELECT %(orders)s, 2, n, ARRAY[id], ARRAY[n::text], 2, now(), now()
FROM numbered WHERE n > %(sent)s + 200 AND n <= %(sent)s + 300;
INSERT INTO outbox_batch (topic_id, lane, first_seq, message_ids, state, claimed_at)
SELECT %(orders)s, 2, n, ARRAY[id], 1, now() FROM numbered WHERE n > %(sent)s + 300 AND n <= %(sent)s + 400;
INSERT INTO outbox_delayed (message_id, due_at, topic_id)
SELECT id, now(), %(orders)s FROM numbered WHERE n > %(sent)s + 400 AND n <= %(sent)s + 500;
INSERT INTO outbox_ticket (message_id, topic_id) SELECT id, %(orders)s FROM numbered WHERE n > %(sent)s + 500 ORDER BY n;

INSERT INTO outbox_inbox (consumer_group, idempotency_key, message_id, source, topic, handled_at)
SELECT 'cart', id::text, id, '', 'orders', now() - (%(books)s - n) * interval '1 second' FROM numbered WHERE n <= %(books)s;
INSERT INTO outbox_check_back (request_id, asked_by, topic, message_id, half_id, token, asked, answer, sent_answer, reason,
    about, milliseconds)
SELECT n::text, 'broker', 'orders', id::text, n::text, '', 1, 'COMMIT', '', '', 'none', 1 FROM numbered WHERE n <= %(books)s;
INSERT INTO outbox_failed_delivery
    (consumer_group, message_id, topic, delivery_count, source, outcome, fingerprint, error, traceback)
SELECT 'cart', id, 'orders', 1, '', 'retry', '', 'KeyError', '' FROM numbered WHERE n <= %(books)s;
INSERT INTO outbox_duplicate (consumer_group, message_id, topic, delivery_count)
SELECT 'cart', id, 'orders', 2 FROM numbered WHERE n <= %(books)s;
INSERT INTO outbox_failed_send (batch_id, attempt, message_ids, verdict, reason)
SELECT n, 1, ARRAY[id], 'unsure', 'time-out' FROM numbered WHERE n <= %(books)s;
INSERT INTO outbox_embedded_topic (id, name, type, queues) VALUES (%(orders)s, 'orders', 'transaction', 1) ON CONFLICT DO NOTHING;
INSERT INTO outbox_embedded_message (topic_id, queue, pos, message_id, source, half_id, key, tag, headers, body, stored_at)
SELECT %(orders)s, 0, n, id::text, '', n, '', '', '{}', '', now() FROM numbered WHERE n <= %(books)s;
INSERT INTO outbox_embedded_half (id, topic_id, queue, message_id, source, key, tag, headers, body, token, born_at, ask_at, state)
SELECT n, %(orders)s, 0, id::text, '', '', '', '{}', '', '', now(), now(), CASE WHEN n %% 1000 = 0 THEN 1 ELSE 3 END
FROM numbered WHERE n <= %(books)s;
"""

TABLES = """
ANALYZE outbox_message, outbox_batch, outbox_dead, outbox_ticket, outbox_delayed, outbox_inbox, outbox_check_back,
    outbox_failed_delivery, outbox_duplicate, outbox_failed_send, outbox_embedded_message, outbox_embedded_half
"""


def fill(connection: Connection, messages: int, *, orders: int, rare: int) -> None:
    """
    Fill the tables, in the caller's transaction.

    Args:
        orders, rare: ids of two topics; of the second is one message in a thousand.
    """
    arguments = {
        "orders": orders,
        "rare": rare,
        "sent": messages - max(700, messages // 200),
        "books": min(messages // 2, 50_000),
    }
    connection.execute(IDS, {"messages": messages})
    for statement in FILL.split(";"):
        connection.execute(statement, arguments)
    connection.execute(TABLES)
