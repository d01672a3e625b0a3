"""
The relay decides when batches are claimed, sent and settled. The statements that change a batch are in `outbox/batches/`.

`hosts.py` opens a relay for a database and a broker, and runs it, for a Celery task or for `loops.py`. `rounds.py` does one
round: claim batches (`claims.py`), load and send them (`send.py`), then decide to commit their half messages, commit these, and
mark the batches SENT (`commit.py`). For a broker with transactional sends, `transactions.py` does everything after the claim.
Messages that the broker did not accept are released, so that they are claimed again, or marked DEAD (`splitter.py`). The sweep in
`commit.py` settles commits that got no answer. `cloudevents.py` builds the message for the broker from its row. `maintenance.py`
creates and drops daily partitions, and prunes. An idle relay waits in `wakeup.py`; `breaker.py` decides for how long nothing is
sent during an outage.

WHEN A RELAY IS KILLED, at whatever point, other relays finish its work:

- Its database connection ends, and with it the session lock of its lane (`lane.py`). Other relays see at once that the
  lane is free.
- Batches claimed but not decided: any relay of the broker claims them again, with attempt + 1 (`reclaim`); a relay that
  takes the lane releases them first (`release_left`). Half messages of the old attempt are rolled back by the check-back. If the
  broker had already stored a one-phase message, it is stored a second time; the consumers' inbox drops the duplicate, or the
  broker itself if it deduplicates sends.
- Batches decided but not committed or not marked: the decision stands. The check-back answers COMMIT, and the sweep settles the
  batch. If half messages may be committed twice without harm (on the embedded broker), the sweep commits them again after
  `SWEEP_AGE`. On RocketMQ no other process commits them before `ends_until`. Some seconds after that, the sweep takes the batch
  over (`batches/take_over.py`), looks up its half messages, and commits those that are hidden. A message that was certainly not
  published is sent again. If nothing proves whether a message was published, it becomes DEAD, for an operator to decide.
- A late write of the killed relay names an older attempt, or a state that the batch no longer has, so it matches no row. This
  is the fence.

How check-backs are answered is in `check_backs/resolve.py`; the steps of the state machine are in `batches/`.
"""
