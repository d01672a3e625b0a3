"""
Consumers: each message takes effect once per group, if its effects are writes to the group's database.

| question | file |
|---|---|
| How is a handler registered, and with what `RetryPolicy`? | `register.py` |
| Who receives messages, and acknowledges them at the broker? | `worker.py` |
| Who runs a handler, in one transaction with its inbox row, and who drops duplicates? | `handle.py` |
| Who decides whether a message is retried or becomes a dead letter, and what is counted? | `outcome.py`, in `decide_deferral` |
| Where are messages stored that could not be handled, and who runs them again? | `deferred.py`, `run_deferred.py` |
| What can an operator do with deferred messages? | `acts.py` |
| Who deletes finished deferred messages, and gives up those without a handler? | `deferred_housekeeping.py` |
| Who renews a delivery while its handler runs, and ends the handler at its time limit? | `lease_thread.py` |
| How does a delivery become a handler's message, and its `Context`? | `read.py`, `delivery_info.py` |
| Which messages does each process of a group take, and which groups does a database know? | `subscriptions.py` |
| Who finds messages that never arrived, by their missing numbers? | `gaps.py` |
| Who keeps two projects from sharing a group's name? | `owners.py` |
| How does an effect outside of the database happen only once? | `idempotency_key.py` |
| How is a row updated only if it is unchanged? | `precondition.py` |
"""
