"""Load a dump into an empty database, as if it had been made at another time."""

import re
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import psycopg

from outbox.ids import first_id_at

MADE_AT = re.compile(r"^-- Made at (.*)\.$", re.MULTILINE)

# Days in times, in the names of partitions, and in ids, whose first 48 bits are milliseconds.
IN_TIME = re.compile(r"\b\d{4}-\d\d-\d\d(?=[ T]\d\d:\d\d)")
IN_NAME = re.compile(r"(?<=outbox_message_)\d{8}")
IN_ID = re.compile(r"\b([0-9a-f]{8})-([0-9a-f]{4})(?=-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b)")
SPAN = timedelta(days=60)  # between the times in a dump; further away an id is not of a message


def load(dump: Path, url: str, *, age: timedelta) -> None:
    """Load a dump whose times are moved by whole days, so that it is at least that old, and less than a day older."""
    text = dump.read_text()
    found = MADE_AT.search(text)
    assert found, f"{dump} does not say when it was made"
    made_at = datetime.fromisoformat(found[1])
    days = (datetime.now(UTC) - age - made_at) // timedelta(days=1)
    with psycopg.connect(url) as connection:
        connection.execute(moved(text, days, made_at))


def moved(text: str, days: int, made_at: datetime) -> str:
    """Return a dump whose times are later by some days."""
    by = timedelta(days=days)
    first, last = (first_id_at(made_at + span).int >> 80 for span in (-SPAN, SPAN))

    def move_id(found: re.Match[str]) -> str:
        milliseconds = int(found[1] + found[2], 16)
        if not first <= milliseconds <= last:
            return found[0]
        digits = f"{milliseconds + by // timedelta(milliseconds=1):012x}"
        return f"{digits[:8]}-{digits[8:]}"

    text = IN_TIME.sub(lambda found: str(date.fromisoformat(found[0]) + by), text)
    text = IN_NAME.sub(lambda found: f"{datetime.strptime(found[0], '%Y%m%d').replace(tzinfo=UTC) + by:%Y%m%d}", text)
    return IN_ID.sub(move_id, text)
