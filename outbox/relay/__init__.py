"""
The relay: decides when batches are claimed, sent and settled, and for whom. How a row changes stands in
`outbox/batches/`.

`hosts.py` opens a relay for a database and a broker, and runs it from a Celery task or from `resident.py`.
`rounds.py` is one round: claim (`claims.py`), load (`load.py`), send (`send.py`), then decide, commit and mark
(`commit.py`); what was not accepted goes back (`splitter.py`). `sweep.py` settles what was decided long ago,
`maintenance.py` makes days and prunes.

WHEN A RELAY IS KILLED, at whatever point, nothing has to be told to anybody:

- Its database connection ends, and with it the session lock of its lane (`lane.py`): the others know at once that its
  owner is gone.
- Claimed, not decided: the batch is claimed again with attempt + 1, by `reclaim` of any relay or, first of all, by
  whoever takes the lane (`release_left`). A half message of the old attempt is rolled back by the check-back. A
  one-phase message that the broker had stored already is a duplicate, which the consumers' inbox drops.
- Decided, not committed or not marked: the decision stands. The sweep commits again where a second end does no harm;
  elsewhere the check-back answers COMMIT, and behind its horizon the sweep asks the broker for the message itself.
- A write of the killed one that comes late names an older attempt, or a state that the batch has left, and matches
  nothing: the fence.

The other half of the story is the check-back's (`check_backs/resolve.py`), the steps themselves are in `batches/`.
"""
