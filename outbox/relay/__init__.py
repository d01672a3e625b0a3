"""
The relay: decides when batches are claimed, sent and settled, and for whom. How a row changes stands in
`outbox/batches/`.

`hosts.py` opens a relay for a database and a broker, and runs it from a Celery task or from `resident.py`.
`rounds.py` is one round: claim (`claims.py`), load (`load.py`), send (`send.py`), then decide, commit and mark
(`commit.py`); what was not accepted goes back (`splitter.py`). `sweep.py` settles what was decided long ago,
`maintenance.py` and `prune.py` keep the tables in shape, `delayed.py` gives delayed messages their tickets. An idle
relay waits in `wakeup.py`; `breaker.py` and `backoff.py` decide how long nothing is tried; `cloudevents.py` makes of a
row what travels.

WHEN A RELAY IS KILLED, at whatever point, nothing has to be told to anybody:

- Its database connection ends, and with it the session lock of its lane (`lane.py`): the others know at once that its
  owner is gone.
- Claimed, not decided: any relay of the broker claims the batch again, with attempt + 1 (`reclaim`); whoever takes the
  lane releases it first (`release_left`). A half message of the old attempt is rolled back by the check-back. A
  one-phase message that the broker had stored already is a duplicate, which the consumers' inbox drops, or the broker
  itself where it deduplicates sends.
- Decided, not committed or not marked: the decision stands, and nobody but its relay ends its half messages before
  `ends_until`. Then the check-back answers COMMIT, and the sweep settles the batch: it commits again where a second end
  does no harm; elsewhere it takes the batch over, looks up where its half messages stand, and commits those that are
  hidden. What surely never was published is sent again; what nobody can prove is DEAD, for an operator to decide.
- A write of the killed one that comes late names an older attempt, or a state that the batch has left, and matches
  nothing: the fence.

The check-back's part is in `check_backs/resolve.py`, the edges of the state machine are in `batches/`.
"""
