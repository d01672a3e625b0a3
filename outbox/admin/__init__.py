"""The outbox in Django's admin. It translates and decides nothing: what reads and what acts stands in the rooms below."""

from outbox.admin import audits, check_backs, days, dead, findings, halves, inbox, letters, messages, monitor, topics

__all__ = ["audits", "check_backs", "days", "dead", "findings", "halves", "inbox", "letters", "messages", "monitor", "topics"]
