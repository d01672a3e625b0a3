"""Message ids that a test can name: the same place has the same id."""

from uuid import NAMESPACE_OID, uuid5


def message_id(topic: str, lane: int, number: int) -> str:
    """Make a uuid7 of 1 March 2026, 12:00 UTC and a few seconds, as the number says."""
    milliseconds = f"{1772366400000 + number * 10:012x}"
    rest = uuid5(NAMESPACE_OID, f"{topic} {lane} {number}").hex
    return f"{milliseconds[:8]}-{milliseconds[8:]}-7{rest[:3]}-8{rest[3:6]}-{rest[6:18]}"
