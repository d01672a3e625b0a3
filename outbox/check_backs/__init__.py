"""
The check-back: a broker asks whether the transaction of a half message was committed.

`resolve.py` decides the answer. `answer.py` finds the database (with `sources.py`), records the answer and logs it. `ask.py` and
`loop.py` let brokers ask. `register.py` has the `@check_back` functions, which answer for half messages of other producers.
"""

from outbox.message import COMMIT, ROLLBACK, UNKNOWN, Resolution

__all__ = ["COMMIT", "ROLLBACK", "UNKNOWN", "Resolution"]
