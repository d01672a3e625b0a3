"""
Consumers: each message's database effects once per group.

`worker.py` receives and acknowledges, `handle.py` runs one handler in one transaction with its inbox row. `outcome.py`
decides what follows a failure: it is counted (`failure_counts.py`), recorded (`failure.py`), and retried as its `Retry` says
(`register.py`), or the message becomes a dead letter (`dead_letters.py`). `register.py` has `@consumer`; `gaps.py` finds
numbers that never came.
"""
