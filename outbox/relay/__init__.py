"""
The relay decides when batches are claimed, sent and settled. The statements that change a batch are in `outbox/batches/`.

`hosts.py` opens a relay for a database and a broker, and runs it from a Celery task or from `loops.py`.
`rounds.py` is one round: claim (`claims.py`), load and send (`send.py`), then decide, commit and mark (`commit.py`, which
also sweeps: it settles commits that stayed open). Messages that were not accepted go back (`splitter.py`).
`cloudevents.py` builds the message for the broker from its row. `maintenance.py` keeps the tables in shape. An idle relay
waits in `wakeup.py`; `breaker.py` decides how long nothing is sent after an outage.

WHEN A RELAY IS KILLED, at whatever point, other relays finish its work:

- Its database connection ends, and with it the session lock of its lane (`lane.py`). Other relays see at once that the
  lane is free.
- Batches claimed but not decided: any relay of the broker claims them again, with attempt + 1 (`reclaim`); a relay that
  takes the lane releases them first (`release_left`). Half messages of the old attempt are rolled back by the
  check-back. A one-phase message that the broker had stored already becomes a duplicate, which the consumers' inbox
  drops, or the broker itself where it deduplicates sends.
- Batches decided but not committed or not marked: the decision stands. The check-back answers COMMIT, and the sweep
  settles the batch. Where a second end does no harm (the embedded broker), it commits again after `SWEEP_AGE`. Elsewhere
  (RocketMQ) no other process ends their half messages before `ends_until`; a while later the sweep takes the batch over
  (`batches/take_over.py`), looks its half messages up, and commits those that are hidden. A message that was certainly not
  published is sent again; a message that cannot be proved either way is DEAD, for an operator to decide.
- A late write of the killed relay names an older attempt, or a state that the batch has left, and matches no row: the
  fence.

The check-back's part is in `check_backs/resolve.py`, the edges of the state machine are in `batches/`.
"""
