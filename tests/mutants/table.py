"""
The rules, and the texts by which each is taken out.

A mutant is a text of one file that is replaced in a copy of the checkout. Its tests are those that belong to the rule, so that one
takes seconds. `tests/explorer/mutants.py` takes other rules out while the explorer runs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """
    A rule that is taken out.

    Args:
        rule: what the framework does.
        file: where, below the root.
        old, new: the text that is replaced, which the file has once, and what stands there without the rule.
        tests: arguments of pytest.
    """

    rule: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


RELAY, CONSUMING = "tests/outbox/relay", "tests/outbox/consuming"
TRANSACTIONS = (f"{RELAY}/test_transactions.py",)
KAFKA_IN_USE = ("-m", "kafka", "tests/outbox/brokers/kafka/test_receiver.py", "-k", "TestInUse")
STEPS, CLAIM, SPLIT = "outbox/batches/steps.py", "outbox/batches/claim.py", "outbox/batches/split.py"
RESOLVE = "outbox/check_backs/resolve.py"
HANDLE, HANDLER, INBOX = "outbox/consuming/handle.py", "outbox/consuming/handler.py", "outbox/consuming/inbox.py"
DEFERRED, WORKER, LEASES = "outbox/consuming/deferred.py", "outbox/consuming/worker.py", "outbox/consuming/lease_thread.py"
TEST_DEFERRED = (f"{CONSUMING}/test_deferred.py",)

MUTANTS: dict[str, Mutant] = {
    "decision-fence": Mutant(
        "A decision names the attempt of its claim",
        STEPS,
        'WHERE id = %(id)s AND state = {State.CLAIMED} AND attempt = %(attempt)s RETURNING id\n"""\n\n\ndef decide(',
        'WHERE id = %(id)s AND state = {State.CLAIMED} RETURNING id\n"""\n\n\ndef decide(',
        (f"{RELAY}/test_decide.py", f"{RELAY}/faults/test_races.py"),
    ),
    "mark-fence": Mutant(
        "A batch is marked as sent by the attempt that sent it",
        STEPS,
        "WHERE b.id = s.id AND b.state = %s AND b.attempt = s.attempt RETURNING b.id",
        "WHERE b.id = s.id AND b.state = %s RETURNING b.id",
        (f"{RELAY}/test_mark.py",),
    ),
    "return-fence": Mutant(
        "A batch is returned by the attempt that holds it",
        STEPS,
        "failures = failures + %(counted)s::int, due_at = clock_timestamp() + %(wait)s, lease_until = NULL, last_error = %(error)s\n"
        "WHERE id = %(id)s AND state = {State.CLAIMED} AND attempt = %(attempt)s RETURNING id",
        "failures = failures + %(counted)s::int, due_at = clock_timestamp() + %(wait)s, lease_until = NULL, last_error = %(error)s\n"
        "WHERE id = %(id)s AND state = {State.CLAIMED} RETURNING id",
        (f"{RELAY}/test_splitter.py", f"{RELAY}/test_mark.py"),
    ),
    "split-fence": Mutant(
        "Positions are split off by the attempt that holds the batch",
        SPLIT,
        "WHERE id = %(id)s AND state = {state} AND attempt = %(attempt)s\n",
        "WHERE id = %(id)s AND state = {state}\n",
        (f"{RELAY}/test_splitter.py", f"{RELAY}/test_decide.py", f"{RELAY}/faults/test_races.py"),
    ),
    "split-once": Mutant(
        "A position is split off once",
        SPLIT,
        "AND NOT split && %(positions)s::smallint[] AND cardinality(message_ids) > 1",
        "AND cardinality(message_ids) > 1",
        (f"{RELAY}/test_splitter.py", f"{RELAY}/test_commit.py"),
    ),
    "split-numbers": Mutant(
        "A position that is split off keeps its number",
        SPLIT,
        "first_seq + run.lo - 1",
        "first_seq",
        (f"{RELAY}/test_splitter.py",),
    ),
    "reclaim-lease": Mutant(
        "A batch is claimed again when its lease is over, or its relay gone",
        CLAIM,
        'AND (batch.lease_until < clock_timestamp() OR {IS_LANE_FREE.format(lane="batch.owner")}))',
        ")",
        (f"{RELAY}/test_claims_again.py",),
    ),
    "reclaim-attempt": Mutant(
        "Each claim is another attempt",
        CLAIM,
        "attempt = attempt + 1, owner = %(lane)s, due_at = NULL",
        "owner = %(lane)s, due_at = NULL",
        (f"{RELAY}/test_claims_again.py",),
    ),
    "reclaim-transaction": Mutant(
        "A claim leaves the transaction that may hold the batch as it is",
        CLAIM,
        "tx_lane = CASE WHEN %(in_transactions)s THEN tx_lane END, tx_attempt = CASE WHEN %(in_transactions)s THEN tx_attempt END,",
        "tx_lane = CASE WHEN %(in_transactions)s THEN %(lane)s END,\n"
        "        tx_attempt = CASE WHEN %(in_transactions)s THEN attempt + 1 END,",
        TRANSACTIONS,
    ),
    "reclaim-order": Mutant(
        "A batch waits for earlier ones of its keys",
        CLAIM,
        "            AND earlier.order_keys && batch.order_keys\n",
        "            AND false\n",
        (f"{RELAY}/test_claims_again.py",),
    ),
    "free-keys": Mutant(
        "A ticket waits for the unfinished batches of its key",
        CLAIM,
        "SELECT key FROM outbox_batch, unnest(order_keys) key WHERE state IN {UNFINISHED} AND key IS NOT NULL",
        "SELECT key FROM outbox_batch, unnest(order_keys) key WHERE false",
        (f"{RELAY}/test_claims_ordered.py",),
    ),
    "dead-heads": Mutant(
        "A ticket waits for the dead batches of its key",
        CLAIM,
        "SELECT key FROM outbox_batch, unnest(order_keys) key WHERE state = {State.DEAD} AND key IS NOT NULL))",
        "SELECT key FROM outbox_batch, unnest(order_keys) key WHERE false))",
        (f"{RELAY}/test_claims_ordered.py",),
    ),
    "skip-locked": Mutant(
        "A claim passes over tickets that another one has locked",
        CLAIM,
        'ORDER BY pos LIMIT (SELECT per_topic FROM share) FOR UPDATE SKIP LOCKED) ticket)"""',
        'ORDER BY pos LIMIT (SELECT per_topic FROM share)) ticket)"""',
        (f"{RELAY}/test_claims.py",),
    ),
    "check-back-missing": Mutant(
        "A check-back about a batch that is missing is UNKNOWN",
        RESOLVE,
        'return _unknown(f"Batch {token.batch} is missing: wrong database, or one restored to an older state?", is_alert=True)',
        'return _rollback(f"Batch {token.batch} is missing.")',
        ("tests/outbox/check_backs/test_resolve.py",),
    ),
    "check-back-fence": Mutant(
        "A check-back fences a batch before it answers ROLLBACK",
        RESOLVE,
        "            fence(connection, token.batch, token.attempt)\n",
        "",
        ("tests/outbox/check_backs/test_resolve.py",),
    ),
    "check-back-half": Mutant(
        "A check-back commits only the half message that was decided",
        RESOLVE,
        "    if batch.half_id != half.half_id:\n",
        "    if False:\n",
        ("tests/outbox/check_backs/test_resolve.py",),
    ),
    "check-back-attempt": Mutant(
        "A half message of an earlier attempt is rolled back",
        RESOLVE,
        "    if token.attempt < batch.attempt:\n",
        "    if False:\n",
        ("tests/outbox/check_backs/test_resolve.py",),
    ),
    "check-back-replica": Mutant(
        "A replica answers no check-back",
        RESOLVE,
        "    if is_read_only:\n",
        "    if False:\n",
        ("tests/outbox/check_backs/test_resolve.py",),
    ),
    "check-back-window": Mutant(
        "A check-back is UNKNOWN while a commit may be in progress",
        RESOLVE,
        "    if is_being_ended:\n",
        "    if False:\n",
        ("tests/outbox/check_backs/test_resolve.py",),
    ),
    "tombstone": Mutant(
        "A transaction fails whose tombstone was written first",
        "outbox/batches/half_first.py",
        "WITH message AS ({INSERT_ROW}),\nbatch AS (",
        "WITH message AS ({INSERT_ROW} ON CONFLICT DO NOTHING),\nbatch AS (",
        ("tests/outbox/half_first/test_tombstone.py",),
    ),
    "commit-fence": Mutant(
        "The lane is settled by the transaction that the marker names, whoever has claimed the batch since",
        "outbox/batches/transactions.py",
        "AND b.tx_lane = %(lane)s AND b.tx_attempt = sent.attempt AND b.{MAY_BE_HELD} RETURNING b.id",
        "AND b.attempt = sent.attempt AND b.{MAY_BE_HELD} RETURNING b.id",
        TRANSACTIONS,
    ),
    "marker-not-asked": Mutant(
        "The marker decides what a lane left in doubt",
        "outbox/relay/transactions.py",
        "        settled = settle_lane(self.connection, lane, self.broker.alias, marker.sent)\n",
        "        settled = settle_lane(self.connection, lane, self.broker.alias, ())\n",
        TRANSACTIONS,
    ),
    "nobody-fenced": Mutant(
        "The lane of another relay is fenced before its marker is read",
        "outbox/relay/transactions.py",
        "marker = self._decode_marker(self._transactional_broker.open_lane(self.source, recorded.lane), recorded.lane)",
        "marker = self._decode_marker(self._transactional_broker.read_lane_marker(self.source, recorded.lane), recorded.lane)",
        TRANSACTIONS,
    ),
    "marker-lost": Mutant(
        "A lost marker is no answer",
        "outbox/relay/transactions.py",
        "            self._give_up_lane()\n",
        "            self._settle(Marker())\n",
        TRANSACTIONS,
    ),
    "withdraw": Mutant(
        "What was certainly not committed is in no transaction any more",
        "outbox/relay/transactions.py",
        "        withdraw(self.connection, self.lane, [result.batch for result in results])\n",
        "",
        TRANSACTIONS,
    ),
    "inbox-row": Mutant(
        "A message that the inbox has is not handled again",
        INBOX,
        "    ON CONFLICT (consumer_group, idempotency_key) DO NOTHING\n    RETURNING 1\n",
        "    ON CONFLICT (consumer_group, idempotency_key) DO UPDATE SET message_id = excluded.message_id\n    RETURNING 1\n",
        (f"{CONSUMING}/test_inbox.py", f"{CONSUMING}/test_handle.py"),
    ),
    "inbox-transaction": Mutant(
        "The inbox row is committed with what the handler writes",
        HANDLE,
        "        claimed_indexes = [index for index, claimed in enumerate(run.claims) if claimed is Claim.CLAIMED]\n",
        '        connections[consumer.using].connection.execute("COMMIT")\n'
        "        claimed_indexes = [index for index, claimed in enumerate(run.claims) if claimed is Claim.CLAIMED]\n",
        (f"{CONSUMING}/test_inbox.py", f"{CONSUMING}/test_handle.py"),
    ),
    "ordered-work": Mutant(
        "Two messages of a key are not handled at once",
        INBOX,
        "(pg_try_advisory_xact_lock({Lock.ORDER}, hashtext(%(order)s::text))\n",
        "(true\n",
        (f"{CONSUMING}/test_inbox.py",),
    ),
    "broken-transaction": Mutant(
        "A handler that marks its transaction for rollback has failed",
        HANDLER,
        "if connection.needs_rollback or status != TransactionStatus.INTRANS:",
        "if status != TransactionStatus.INTRANS:",
        (f"{CONSUMING}/test_handle.py",),
    ),
    "inbox-lock": Mutant(
        "Two processes do not handle a message at once",
        INBOX,
        '    SELECT {_LOCK.format("key")} AS is_locked,',
        "    SELECT true AS is_locked,",
        (f"{CONSUMING}/test_inbox.py",),
    ),
    "copies-in-a-batch": Mutant(
        "Of two copies in one call of a handler, one is dropped",
        INBOX,
        "Claim.CLAIMED if is_new and not is_copy else Claim.KNOWN",
        "Claim.CLAIMED if is_new else Claim.KNOWN",
        (f"{CONSUMING}/test_batches.py", f"{CONSUMING}/test_inbox.py"),
    ),
    "other-release": Mutant(
        "A message that another release of the group handles is deferred for it",
        "outbox/consuming/subscriptions.py",
        "p.subscriptions && string_to_array(g.matching, chr(10))",
        "false",
        (f"{CONSUMING}/test_subscriptions.py",),
    ),
    "other-release-takes": Mutant(
        "A deferred message is run by a process that has a handler for it",
        DEFERRED,
        "d.topic || '{SEPARATOR}' || d.type || '{SEPARATOR}*' = ANY (%(subscriptions)s::text[])",
        "d.topic IS NOT NULL OR '*' = ANY (%(subscriptions)s::text[])",
        (f"{CONSUMING}/test_subscriptions.py", f"{CONSUMING}/test_read.py"),
    ),
    "acknowledge-first": Mutant(
        "A message is acknowledged when it is known",
        WORKER,
        "                results = self._handle([held.delivery for held in taken])\n",
        "                broker.ack([held.delivery for held in taken])\n"
        "                results = self._handle([held.delivery for held in taken])\n",
        (f"{CONSUMING}/test_worker.py", f"{CONSUMING}/test_outage.py"),
    ),
    "outage-in-a-hand": Mutant(
        "After a message that is not known in the end, the rest is released",
        WORKER,
        "            while not (is_outage or error_to_raise or self._stop.is_set()) and",
        "            while not (error_to_raise or self._stop.is_set()) and",
        (f"{CONSUMING}/test_outage.py",),
    ),
    "renew-taken": Mutant(
        "The message of a slow handler is renewed",
        LEASES,
        "*(() if is_given_up else self._taken))",
        ")",
        (f"{CONSUMING}/test_lease_thread.py",),
    ),
    "slow-key": Mutant(
        "What waits behind a slow handler and has its message's key is not deferred",
        LEASES,
        "            if key is not None and order_key_of(held.delivery) == key:",
        "            if False:",
        (f"{CONSUMING}/test_lease_thread.py",),
    ),
    "redelivery": Mutant(
        "A message that comes again is not run before that is on record",
        HANDLE,
        "        if delivery.delivery_count > 1:\n",
        "        if False:\n",
        TEST_DEFERRED,
    ),
    "deferred-doubt": Mutant(
        "A message that comes again may have killed a process, whyever it is deferred",
        DEFERRED,
        "crashes=int(delivery.delivery_count > 1)",
        "crashes=0",
        TEST_DEFERRED,
    ),
    "deferred-known": Mutant(
        "A message that the inbox has is not deferred",
        DEFERRED,
        "WHERE i.consumer_group = %(group)s::text AND i.message_id = g.message_id)\n    AND NOT",
        "WHERE false)\n    AND NOT",
        (f"{CONSUMING}/test_handle.py", f"{CONSUMING}/test_subscriptions.py"),
    ),
    "deferred-behind": Mutant(
        "A message waits for the deferred ones of its key",
        INBOX,
        "            AND NOT EXISTS (SELECT FROM outbox_deferred WHERE order_key = %(order)s::text AND dead_at IS NULL))",
        "            )",
        TEST_DEFERRED,
    ),
    "deferred-itself": Mutant(
        "A late claim finds that its message is deferred",
        INBOX,
        "CLAIM_IN_ORDER = _claim_statement(is_next=_IS_NEXT, is_known=_IS_DEFERRED)",
        "CLAIM_IN_ORDER = _claim_statement(is_next=_IS_NEXT)",
        TEST_DEFERRED,
    ),
    "take-first": Mutant(
        "Only the first deferred message of a key is run",
        DEFERRED,
        ' AND {_IS_FIRST_OF_KEY.format(key="d.order_key", more=" AND e.id < d.id")}',
        "",
        TEST_DEFERRED,
    ),
    "take-recorded": Mutant(
        "The beginning of a run is on record",
        DEFERRED,
        "SET runs = runs + 1, crashes = crashes + 1, due_at",
        "SET runs = runs + 1, due_at",
        TEST_DEFERRED,
    ),
    "take-doubt": Mutant(
        "A process runs one message in doubt at a time",
        DEFERRED,
        "(d.crashes = 0 OR %(may_doubt)s)",
        "(d.crashes = 0 OR %(may_doubt)s IS NOT NULL)",
        TEST_DEFERRED,
    ),
    "lease-token": Mutant(
        "A run that another process has taken over does not begin",
        DEFERRED,
        "WHERE id = %(id)s AND runs = %(runs)s AND dead_at IS NULL FOR UPDATE SKIP LOCKED",
        "WHERE id = %(id)s AND %(runs)s > 0 AND dead_at IS NULL FOR UPDATE SKIP LOCKED",
        TEST_DEFERRED,
    ),
    "lease-message": Mutant(
        "A deferred message is not run while another process handles it",
        DEFERRED,
        "SELECT pg_try_advisory_xact_lock({Lock.INBOX}, hashtext(%(group)s::text || ' ' || %(idempotency_key)s::text))",
        "SELECT %(idempotency_key)s::text IS NOT NULL",
        (f"{CONSUMING}/test_inbox.py",),
    ),
    "lease-key": Mutant(
        "A deferred message is not run while a later one of its key is handled",
        DEFERRED,
        "    AND (%(order)s::text IS NULL OR pg_try_advisory_xact_lock({Lock.ORDER}, hashtext(%(order)s::text)))",
        "    AND (%(order)s::text IS NULL OR true)",
        (f"{CONSUMING}/test_inbox.py",),
    ),
    "end-token": Mutant(
        "The end of a run that another process has taken over is dropped",
        DEFERRED,
        '\nWHERE id = %(id)s AND runs = %(runs)s AND dead_at IS NULL\n"""\n\n# Count a run',
        '\nWHERE id = %(id)s AND %(runs)s > 0 AND dead_at IS NULL\n"""\n\n# Count a run',
        TEST_DEFERRED,
    ),
    "end-savepoint": Mutant(
        "A failure is written under the lock of its row",
        "outbox/consuming/run_deferred.py",
        "            if is_conflict(error) or run.error_at_shutdown(error) or not _is_alive(using):\n",
        "            if True:\n",
        TEST_DEFERRED,
    ),
    "deferred-twice": Mutant(
        "A deferred message that the inbox has is not run",
        DEFERRED,
        "    FROM d WHERE NOT EXISTS (\n"
        "        SELECT FROM outbox_inbox WHERE consumer_group = %(group)s::text AND message_id = %(message_id)s::uuid)\n",
        "    FROM d\n",
        TEST_DEFERRED,
    ),
    "own-key": Mutant(
        "With a key of the handler's own, a message is looked for by its id, too",
        INBOX,
        'CLAIM_OWN = _claim_statement(is_known=f"({_IS_DEFERRED} OR {_IS_ENDED})")',
        "CLAIM_OWN = _claim_statement()",
        TEST_DEFERRED,
    ),
    "next": Mutant(
        "The end of a message wakes the next one of its key",
        "outbox/consuming/run_deferred.py",
        "        deferred.wake_next(taken.order_key, group.using)\n",
        "        pass\n",
        TEST_DEFERRED,
    ),
    "sweep": Mutant(
        "A message that is asleep is woken where nobody else wakes it",
        DEFERRED,
        "FROM head h WHERE h.due_at IS NULL AND d.id = h.id",
        "FROM head h WHERE false AND d.id = h.id",
        TEST_DEFERRED,
    ),
    "probe": Mutant(
        "Nothing is received until the database takes a message again",
        WORKER,
        "                deferred.probe(self.group.name, os.urandom(self._probe_bytes), self.group.using)\n",
        "                pass\n",
        (f"{CONSUMING}/test_outage.py",),
    ),
    "key-lock": Mutant(
        "A publisher of a key waits for the one before to commit",
        "outbox/publishing/key_locks.py",
        "pg_advisory_xact_lock({Lock.KEY}, hashtext(%s)),",
        "hashtext(%s),",
        ("tests/outbox/publishing/test_order.py",),
    ),
    "retention-hold": Mutant(
        "A day with unfinished batches is kept",
        "outbox/database/retention_holds.py",
        "WHERE state IN (0, 1, 2) AND member.id",
        "WHERE false AND member.id",
        (f"{RELAY}/test_prune.py",),
    ),
    "dead-copy": Mutant(
        "A day with dead messages that have no copy is kept",
        "outbox/database/retention_holds.py",
        "WHERE state = 4 AND member.id",
        "WHERE false AND member.id",
        (f"{RELAY}/test_prune.py",),
    ),
    "held-key": Mutant(
        "After a message that was not accepted, no later one of its key is sent",
        "outbox/relay/send.py",
        "            if key not in stopped_keys and wave.setdefault",
        "            if wave.setdefault",
        (f"{RELAY}/test_send.py",),
    ),
    "held-apart": Mutant(
        "A message that was not accepted holds its own key only",
        "outbox/batches/batch.py",
        "HELD if key in held else rest",
        "rest",
        (f"{RELAY}/test_send.py", *TRANSACTIONS),
    ),
    "late-commit": Mutant(
        "A lane is left after a commit that may have been sent twice",
        "outbox/brokers/kafka/lanes.py",
        "if time.monotonic() - began < SLOW_COMMIT.total_seconds() and not held.is_one_by_one:",
        "if not held.is_one_by_one:",
        ("-m", "kafka", "tests/outbox/brokers/kafka/test_transactions.py"),
    ),
    "kafka-no-report": Mutant(
        "A message of whose delivery the client has not reported is in doubt",
        "outbox/brokers/kafka/sender.py",
        "return [result or NO_REPORT for result in results]",
        "return [result or ACCEPTED for result in results]",
        ("tests/outbox/brokers/kafka/test_sender.py",),
    ),
    "kafka-in-use": Mutant(
        "That a partition is in use is committed before its first record is handed out",
        "outbox/brokers/kafka/partition.py",
        "end = min(self.committed_bound, (self.committed or 0) + limit)",
        "end = (self.committed or 0) + limit",
        KAFKA_IN_USE,
    ),
    "kafka-killed-member": Mutant(
        "What a member that was killed may have been handed counts as delivered before",
        "outbox/brokers/kafka/receiver.py",
        "partition.handed_out_before = max(partition.handed_out_before, note.handed_out_before)",
        "pass",
        KAFKA_IN_USE,
    ),
    "kafka-inherited": Mutant(
        "What was handed out before is noted on, until it is acknowledged",
        "outbox/brokers/kafka/partition.py",
        "bound = max(self.handed_out_before, first + limit if self.is_in_use else 0)",
        "bound = first + limit if self.is_in_use else 0",
        KAFKA_IN_USE,
    ),
    "kafka-idle": Mutant(
        "A partition that is idle is no longer in use",
        "outbox/brokers/kafka/receiver.py",
        "partition.is_in_use, partition.handed_out_before = False, 0",
        "pass",
        KAFKA_IN_USE,
    ),
    "runs": Mutant(
        "Only adjacent positions leave a batch together",
        SPLIT,
        "if last and last.hi == position - 1 and",
        "if last and",
        ("tests/outbox/batches/test_split.py",),
    ),
    "dead-only-refused": Mutant(
        "Only what the broker refuses, or cannot be proved, becomes dead",
        SPLIT,
        "return self.reason in (SplitReason.REFUSED, SplitReason.UNPROVEN)",
        "return self.reason.is_failure",
        (f"{RELAY}/test_splitter.py",),
    ),
    "marker-attempt": Mutant(
        "The marker of another lane names the attempt, too",
        "outbox/relay/transactions.py",
        "if (batch.id, recorded.attempt) in marker.sent:",
        "if batch.id in dict(marker.sent):",
        TRANSACTIONS,
    ),
    "adopt-attempt": Mutant(
        "A batch is adopted by the attempt that has claimed it",
        "outbox/batches/transactions.py",
        'WHERE id = %(id)s AND state = {State.CLAIMED} AND attempt = %(attempt)s RETURNING id\n"""\n\n# The condition names',
        'WHERE id = %(id)s AND state = {State.CLAIMED} RETURNING id\n"""\n\n# The condition names',
        TRANSACTIONS,
    ),
    "other-marker-lost": Mutant(
        "A lost marker of another lane is no answer",
        "outbox/relay/transactions.py",
        "marker = self._decode_marker(self._transactional_broker.open_lane(self.source, recorded.lane), recorded.lane)",
        "marker = self._decode_marker(self._transactional_broker.open_lane(self.source, recorded.lane), recorded.lane) or Marker()",
        TRANSACTIONS,
    ),
    "first-marker": Mutant(
        "A lane without a marker gets one before its first transaction",
        "outbox/relay/transactions.py",
        "            self._give_up_lane()\n            self._reset_marker()\n",
        "            self._give_up_lane()\n",
        TRANSACTIONS,
    ),
    "resend-transaction": Mutant(
        "A message that is sent again is in no transaction",
        "outbox/batches/operators.py",
        "half_places = NULL, ends_until = NULL, tx_lane = NULL, tx_attempt = NULL\nWHERE id = %(batch)s AND state = {State.SENT}",
        "half_places = NULL, ends_until = NULL\nWHERE id = %(batch)s AND state = {State.SENT}",
        ("tests/outbox/batches/test_resend.py", *TRANSACTIONS),
    ),
    "commit-window": Mutant(
        "No end is sent after the broker's window is over",
        "outbox/relay/commit.py",
        "        if self.is_over(since):\n            return []\n",
        "",
        (f"{RELAY}/test_commit.py",),
    ),
    "commit-once": Mutant(
        "Where a second commit makes a copy, only the writer of the decision commits",
        "outbox/relay/commit.py",
        "[batch for batch in decided if batch.is_fresh]",
        "[batch for batch in decided]",
        (f"{RELAY}/test_commit.py",),
    ),
    "other-end": Mutant(
        "Only a broker that remembers ends is believed that a half message was rolled back",
        "outbox/relay/commit.py",
        "        if self.may_repeat_ends:\n            reason =",
        "        if True:\n            reason =",
        (f"{RELAY}/test_commit.py",),
    ),
    "missing-row-rollback": Mutant(
        "Half messages of a batch whose row is gone are not rolled back",
        "outbox/relay/commit.py",
        "        if is_decided is not None:\n            self.end(",
        "        if True:\n            self.end(",
        (f"{RELAY}/test_decide.py",),
    ),
    "read-again": Mutant(
        "A decision whose answer was lost stands",
        "outbox/relay/commit.py",
        "half_ids is not None and is_decided",
        "half_ids is None",
        (f"{RELAY}/test_decide.py",),
    ),
    "late-ends": Mutant(
        "A batch is taken over some time after its window, since a frozen broker may still perform an end",
        "outbox/batches/take_over.py",
        "< clock_timestamp() - %(late_ends)s",
        "< clock_timestamp()",
        (f"{RELAY}/test_sweep_take_over.py",),
    ),
    "renew-own": Mutant(
        "Two sweeps do not end the same batch",
        "outbox/batches/take_over.py",
        "AND batch.ends_until = held.ends_until RETURNING",
        "RETURNING",
        (f"{RELAY}/test_sweep_take_over.py",),
    ),
    "time-over": Mutant(
        "A message whose time is over is not begun",
        "outbox/consuming/lease_thread.py",
        "if time.monotonic() - self._renewed_at >= self._invisible:",
        "if False:",
        (f"{CONSUMING}/test_lease_thread.py",),
    ),
    "silent-rollback": Mutant(
        "A transaction that would silently be rolled back raises",
        "outbox/database/guarded.py",
        '            yield\n            require_alive(alias, "The transaction")\n',
        "            yield\n",
        ("tests/outbox/database/test_guarded.py",),
    ),
    "dedupe-expiry": Mutant(
        "An idempotency key is given to one message until it expires",
        "outbox/publishing/idempotency_keys.py",
        "WHERE d.expires_at <= clock_timestamp()\n",
        "",
        ("tests/outbox/publishing/test_idempotency_keys.py",),
    ),
    "unconfirmed-end": Mutant(
        "The embedded broker keeps a message whose end is not confirmed",
        "outbox/embedded/retention.py",
        "least({NOW} - %(retention)s, %(keep_since)s::timestamptz - interval '1 microsecond')",
        "least({NOW} - %(retention)s, coalesce(%(keep_since)s::timestamptz, 'infinity') + interval '100 years')",
        ("tests/outbox/embedded/test_unconfirmed.py",),
    ),
    "unread": Mutant(
        "The embedded broker keeps what a group has not read",
        "outbox/embedded/retention.py",
        "AND m.pos > %(after)s AND m.pos <= coalesce((",
        "AND m.pos > %(after)s AND m.pos <= greatest(m.pos, (",
        ("tests/outbox/embedded/test_retention.py",),
    ),
    "held-delivery": Mutant(
        "The embedded broker keeps what a group has not finished",
        "outbox/embedded/retention.py",
        "m.pos = slice.pos AND is_old AND NOT is_kept RETURNING",
        "m.pos = slice.pos AND is_old RETURNING",
        ("tests/outbox/embedded/test_retention.py",),
    ),
    "inbox-of-unfinished": Mutant(
        "The inbox remembers a message that may be sent again",
        "outbox/relay/maintenance.py",
        "    AND NOT EXISTS (SELECT FROM unfinished WHERE unfinished.message_id = inbox.message_id)\n",
        "",
        (f"{RELAY}/test_prune_inbox.py",),
    ),
    "inbox-of-deferred": Mutant(
        "The inbox remembers a message that a group has deferred",
        "outbox/relay/maintenance.py",
        "WHERE deferred.message_id = inbox.message_id AND deferred",
        "WHERE false AND deferred",
        (f"{RELAY}/test_prune_inbox.py",),
    ),
    "discard-row": Mutant(
        "A discarded message is known to the inbox",
        "outbox/consuming/acts.py",
        "(Inbox(delivery_count=0, **{name: getattr(row, name) for name in columns}) for row in done), ignore_conflicts=True",
        "(), ignore_conflicts=True",
        (f"{CONSUMING}/test_acts.py",),
    ),
    "discard-lock": Mutant(
        "A message that is being handled is not discarded",
        "outbox/consuming/acts.py",
        "WHERE pg_try_advisory_xact_lock({Lock.INBOX}, hashtext(consumer_group || ' ' || idempotency_key))",
        "WHERE true",
        (f"{CONSUMING}/test_acts.py",),
    ),
    "ended-elsewhere": Mutant(
        "The deferred row of a message that was handled otherwise is deleted",
        "outbox/consuming/deferred_housekeeping.py",
        "            cursor.execute(DELETE_ENDED)\n",
        "            pass\n",
        (f"{CONSUMING}/test_deferred_housekeeping.py",),
    ),
    "odd-number": Mutant(
        "A number of another program that no table can hold is none",
        "outbox/consuming/delivery_info.py",
        " or len(lane) > 5 or len(number) > 19",
        "",
        (f"{CONSUMING}/test_odd.py",),
    ),
    "odd-text": Mutant(
        "A text that PostgreSQL cannot store identifies its message all the same",
        "outbox/consuming/delivery_info.py",
        "    text = storable(text)\n    if len(text)",
        "    if len(text)",
        (f"{CONSUMING}/test_odd.py",),
    ),
    "foreign-identity": Mutant(
        "Messages without a source that have equal ids on two topics are two",
        "outbox/consuming/delivery_info.py",
        'if source else f"topic {topic} {message_id}"',
        "if source else message_id",
        (f"{CONSUMING}/test_odd.py",),
    ),
    "not-run": Mutant(
        "A handler that returns an iterator has not run",
        HANDLER,
        " or isinstance(result, Iterator | AsyncIterator):",
        ":",
        (f"{CONSUMING}/test_handle.py",),
    ),
    "round-bytes": Mutant(
        "After a slow call, fewer bytes are sent at a time",
        "outbox/relay/breaker.py",
        "self.size = max(self.MIN_SIZE, min(self.size, size) // 2)",
        "pass",
        (f"{RELAY}/test_breaker.py",),
    ),
    "rule-fails": Mutant(
        "A rule that fails is a finding, and takes no other one away",
        "outbox/monitoring/attention.py",
        "            findings = [rule_.failed(error)]\n",
        "            raise\n",
        ("tests/outbox/test_extensions.py", "-k", "any_error"),
    ),
    "silenced": Mutant(
        "A silenced finding is left out",
        "outbox/monitoring/attention.py",
        "if not finding.is_silenced() and not",
        "if not",
        ("tests/outbox/monitoring/test_attention.py", "-k", "silenced"),
    ),
}
