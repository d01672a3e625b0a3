"""
How far a stream has read PostgreSQL's tables, so that no late committer slips behind: by transaction ids, not by keys.

Rows appear in the order of their commits, which is neither that of their keys nor that of their times. But below the oldest
transaction that still runs all have ended, for good: who has read all rows of transactions below it has missed none, and
reads none twice. Transaction ids are in no index; so an offset also tells from which time on the rows are that come later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

# The oldest running transaction, the next one's id, and the time.
MEASURE = """
SELECT pg_snapshot_xmin(s)::text::bigint, pg_snapshot_xmax(s)::text::bigint, clock_timestamp() FROM pg_current_snapshot() s
"""

# A transaction may write its first row so long after it began; its rows carry the time of its beginning.
IDLE_AT_FIRST = timedelta(minutes=10)


@dataclass(frozen=True)
class Offset:
    """
    Args:
        horizon: rows of transactions below it have been read.
        following: the transaction id that was the next to be given out then.
        at: when that was, in ISO 8601; empty: at the very beginning.
        since: transactions from `horizon` on got their ids after that time; empty: nothing is known.
    """

    horizon: int = 0
    following: int = 0
    at: str = ""
    since: str = ""

    @classmethod
    def of(cls, found: Mapping[str, Any] | None) -> Offset:
        return cls(**found) if found else cls()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def oldest(self) -> datetime | None:
        """Return the time before which no row can be that is yet to be read."""
        return datetime.fromisoformat(self.since) - IDLE_AT_FIRST if self.since else None


def advance(start: Offset, horizon: int, following: int, at: datetime) -> Offset:
    """Return the offset that follows upon one; the same where there is nothing to be read."""
    if horizon <= start.horizon:
        return start
    if horizon == following:  # nothing was running: all that is to come begins after that time
        since = at.isoformat()
    elif horizon >= start.following:
        since = start.at
    else:  # a transaction runs that was there before
        since = start.since
    return Offset(horizon, following, at.isoformat(), since)
