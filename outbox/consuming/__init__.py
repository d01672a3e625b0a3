"""
Consumers: each message's database effects once per group.

`worker.py` receives and acknowledges, `handle.py` runs one handler in one transaction with its inbox row (`inbox.py`),
`retry.py` and `failure.py` decide what follows a failure. `register.py` has `@consumer`; `gaps.py` finds numbers that
never came.
"""
