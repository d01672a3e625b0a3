"""The outbox in Django's admin. It translates and decides nothing: what reads and what acts stands in the rooms below."""

from outbox.admin import check_backs, dead, inbox, letters, messages, topics

__all__ = ["check_backs", "dead", "inbox", "letters", "messages", "topics"]
