"""
The check-back: did the transaction of this half message commit?

`resolve.py` decides. `answer.py` finds the database (`sources.py`), records the answer and logs it; `ask.py` and `loop.py`
are those who ask. `register.py` keeps the `@check_back` functions of half messages of other producers.
"""

from outbox.message import COMMIT, ROLLBACK, UNKNOWN, Resolution

__all__ = ["COMMIT", "ROLLBACK", "UNKNOWN", "Resolution"]
