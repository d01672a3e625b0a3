"""The outbox in Django's admin. It translates and decides nothing: what reads and what acts stands in the rooms below."""

from outbox.admin import check_backs, dead, inbox, letters, messages, topics
from outbox.admin.about import MessagesAboutMixin

__all__ = ["MessagesAboutMixin", "check_backs", "dead", "inbox", "letters", "messages", "topics"]
